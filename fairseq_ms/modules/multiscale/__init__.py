"""Layers of the multi-scale models."""
