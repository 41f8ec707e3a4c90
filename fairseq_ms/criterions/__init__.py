"""Training criterions; each file registers what it defines."""

from fairseq_ms import register

register()
