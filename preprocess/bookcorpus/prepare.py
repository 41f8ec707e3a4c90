"""The same as ``fairseq-ms prepare bookcorpus``."""

from fairseq_ms_pipeline.datasets.bookcorpus import main

if __name__ == "__main__":
    raise SystemExit(main())
