"""Optimizers that `--optimizer` knows beside fairseq's own."""

from fairseq_ms import register

register()
