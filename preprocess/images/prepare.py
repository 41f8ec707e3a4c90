"""The same as ``fairseq-ms prepare images``."""

from fairseq_ms_pipeline.datasets.images import main

if __name__ == "__main__":
    raise SystemExit(main())
