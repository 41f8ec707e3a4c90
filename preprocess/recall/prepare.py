"""The same as ``fairseq-ms prepare recall``."""

from fairseq_ms_pipeline.datasets.recall import main

if __name__ == "__main__":
    raise SystemExit(main())
