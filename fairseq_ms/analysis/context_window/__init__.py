"""What each further token of context is worth (Multi-scale Transformer LMs, Table 4)."""
