"""What carries a language model inside fairseq."""

from fairseq_ms import register

register()
