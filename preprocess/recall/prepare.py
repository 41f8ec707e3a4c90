"""The same as ``fairseq-ms prepare recall``."""

import sys

from fairseq_ms_pipeline.datasets.recall import main

if __name__ == "__main__":
    sys.exit(main())
