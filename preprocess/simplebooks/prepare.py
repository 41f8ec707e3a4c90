"""The same as ``fairseq-ms prepare simplebooks``."""

from fairseq_ms_pipeline.datasets.simplebooks import main

if __name__ == "__main__":
    raise SystemExit(main())
