"""Which tokens a model is better at (Multi-scale Transformer LMs, Figures 5 and 6)."""
