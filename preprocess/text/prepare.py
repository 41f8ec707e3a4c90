"""The same as ``fairseq-ms prepare text``."""

from fairseq_ms_pipeline.datasets.text import main

if __name__ == "__main__":
    raise SystemExit(main())
