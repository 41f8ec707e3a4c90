"""`fairseq-ms import`: models of fairseq's `transformer_lm` and of `transformers`, as checkpoints of this package."""
