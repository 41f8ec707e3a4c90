"""Datasets and batching that fairseq's own data package does not have."""

from fairseq_ms import register

register()
