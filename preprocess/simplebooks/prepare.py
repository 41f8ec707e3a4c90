"""The same as ``fairseq-ms prepare simplebooks``."""

import sys

from fairseq_ms_pipeline.datasets.simplebooks import main

if __name__ == "__main__":
    sys.exit(main())
