"""What a scale's representation finds alike (Multi-scale Transformer LMs, Table 6)."""
