"""The same as ``fairseq-ms prepare code``."""

from fairseq_ms_pipeline.datasets.code import main

if __name__ == "__main__":
    raise SystemExit(main())
