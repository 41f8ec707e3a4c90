"""The same as ``fairseq-ms prepare wikitext103``."""

from fairseq_ms_pipeline.datasets.wikitext103 import main

if __name__ == "__main__":
    raise SystemExit(main())
