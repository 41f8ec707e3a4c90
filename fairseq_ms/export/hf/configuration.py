"""The configuration of an exported model: the flags it was trained with, and what `transformers` wants to know."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class FairseqMsConfig(PretrainedConfig):
    """A language model of fairseq_ms.

    Args:
        arch: the architecture, as fairseq's ``--arch`` names it
        flags: the flags of the model by name, with underscores
        tied: every further name of a parameter that has several, and its first
        symbols: the index of every symbol that the model asks for by name
        vocab_size: number of symbols, fairseq's four special ones included
        max_position_embeddings: the longest input in tokens, the first symbol included; None for a stream, which has
            no end
    """

    model_type = "fairseq_ms"

    def __init__(
        self,
        arch: str = "",
        flags: dict[str, Any] | None = None,
        tied: dict[str, str] | None = None,
        symbols: dict[str, int] | None = None,
        vocab_size: int = 4,
        max_position_embeddings: int | None = None,
        **settings: Any,
    ) -> None:
        self.arch = arch
        self.flags = flags or {}
        self.tied = tied or {}
        self.symbols = symbols or {}
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**settings)
