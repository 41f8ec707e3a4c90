"""The words that a coarse language model expects after a context (Multi-scale Transformer LMs, Table 7)."""
