"""The same as ``fairseq-ms prepare chars``."""

import sys

from fairseq_ms_pipeline.datasets.chars import main

if __name__ == "__main__":
    sys.exit(main())
