"""Where the memory of a training step goes, and what fits (Multi-scale Transformer LMs, Table 8)."""
