"""lm-evaluation-harness asks our checkpoints: its model ``fairseq_ms``, and tasks over text files."""

from fairseq_ms import register

register()
