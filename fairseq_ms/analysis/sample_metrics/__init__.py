"""What a model's samples are like (Multi-scale Transformer LMs, Table 5)."""
