"""One file per architecture: config dataclass and model; each file registers what it defines."""

from fairseq_ms import register

register()
