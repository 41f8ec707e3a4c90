"""Perplexity by subword and by word, and bits per byte."""
