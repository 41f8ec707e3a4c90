"""The same as ``fairseq-ms prepare cc_news``."""

import sys

from fairseq_ms_pipeline.datasets.cc_news import main

if __name__ == "__main__":
    sys.exit(main())
