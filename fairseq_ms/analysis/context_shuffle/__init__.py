"""What a model loses when its distant context is damaged (Multi-scale Transformer LMs, Figure 4)."""
