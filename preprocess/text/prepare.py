"""The same as ``fairseq-ms prepare text``."""

import sys

from fairseq_ms_pipeline.datasets.text import main

if __name__ == "__main__":
    sys.exit(main())
