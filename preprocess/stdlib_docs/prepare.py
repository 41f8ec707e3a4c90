"""The same as ``fairseq-ms prepare stdlib_docs``."""

import sys

from fairseq_ms_pipeline.datasets.stdlib_docs import main

if __name__ == "__main__":
    sys.exit(main())
