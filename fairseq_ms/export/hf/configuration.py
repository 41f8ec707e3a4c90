"""The configuration of an exported model: its sizes, and what `transformers` wants to know."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class FairseqMsConfig(PretrainedConfig):
    """A language model of fairseq_ms.

    Args:
        arch: the architecture, as fairseq's ``--arch`` names it
        model: the configuration of the core's model, by the names of its fields
        flags: the flags that it was trained with, by name, with underscores
        tied: every further name of a parameter that has several, and its first
        vocab_size: number of symbols, fairseq's four special ones included
        max_position_embeddings: the longest input in tokens, the first symbol included; None where there is no limit
    """

    model_type = "fairseq_ms"

    def __init__(
        self,
        arch: str = "",
        model: dict[str, Any] | None = None,
        flags: dict[str, Any] | None = None,
        tied: dict[str, str] | None = None,
        vocab_size: int = 4,
        max_position_embeddings: int | None = None,
        **settings: Any,
    ) -> None:
        self.arch = arch
        self.model = model or {}
        self.flags = flags or {}
        self.tied = tied or {}
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**settings)
