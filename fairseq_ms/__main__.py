"""`python -m fairseq_ms`, the same as the console script `fairseq-ms`."""

import sys

from fairseq_ms.cli import main

if __name__ == "__main__":
    sys.exit(main())
