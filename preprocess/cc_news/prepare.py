"""The same as ``fairseq-ms prepare cc_news``."""

from fairseq_ms_pipeline.datasets.cc_news import main

if __name__ == "__main__":
    raise SystemExit(main())
