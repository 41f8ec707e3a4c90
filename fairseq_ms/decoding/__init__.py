"""Cached decoding: token by token, prompts in one pass, one file a family of models."""
