"""What perplexity costs in memory or time (Multi-scale Transformer LMs, Figure 3)."""
