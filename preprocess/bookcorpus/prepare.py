"""The same as ``fairseq-ms prepare bookcorpus``."""

import sys

from fairseq_ms_pipeline.datasets.bookcorpus import main

if __name__ == "__main__":
    sys.exit(main())
