"""The same as ``fairseq-ms prepare chars``."""

from fairseq_ms_pipeline.datasets.chars import main

if __name__ == "__main__":
    raise SystemExit(main())
