"""The same as ``fairseq-ms prepare stdlib_docs``."""

from fairseq_ms_pipeline.datasets.stdlib_docs import main

if __name__ == "__main__":
    raise SystemExit(main())
