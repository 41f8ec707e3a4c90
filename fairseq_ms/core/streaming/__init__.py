"""Layers and memories of the streaming models."""
