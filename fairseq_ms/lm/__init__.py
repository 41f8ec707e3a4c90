"""What carries a language model inside fairseq."""
