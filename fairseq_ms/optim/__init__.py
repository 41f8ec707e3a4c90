"""Optimizers that `--optimizer` knows beside fairseq's own."""
