"""The same as ``fairseq-ms prepare images``."""

import sys

from fairseq_ms_pipeline.datasets.images import main

if __name__ == "__main__":
    sys.exit(main())
