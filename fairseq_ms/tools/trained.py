"""A trained model and the data it is asked about, whoever trained it: fairseq, or a plain loop over the core."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_ms.core import CausalModel
from fairseq_ms.errors import UsageError


class Trained(ABC):
    """A trained model in evaluation mode.

    Attributes:
        label: how tables and figures call it
        path: the file it came from
        model: what has its weights
        core: the model of the core
        arch: what kind of model it is
        dictionary: fairseq's, or one that answers alike
        streaming: whether the model hands a memory from one segment to the next
        segment: the number of tokens of a training sample; for a streaming model, of a segment
        adds_bos: whether every sample begins with an extra symbol, which takes a position and is never scored
        longest: the most tokens that one window can hold, an extra first symbol not counted; None if there is no limit
        data: where the data lie that it is asked about, as it was said
        folder: in or above it lies the manifest that says how text becomes symbols
        by_line: whether every line of the data is a text of its own
        counts: what a text that is no prepared data was found to have, as a manifest counts it
    """

    label: str
    path: str
    model: Any
    core: CausalModel
    arch: str
    dictionary: Any
    streaming: bool
    segment: int
    adds_bos: bool
    longest: int | None
    data: str
    folder: Path
    by_line = False
    counts: ClassVar[dict[str, int]] = {}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @abstractmethod
    def read(self, source_BT: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        """Features (B, T, D), and the memory after them of a streaming model."""

    @abstractmethod
    def log_probs(self, features_BTD: Tensor, target_BT: Tensor) -> Tensor:
        """Log-probabilities (B, T, V) of all symbols."""

    def flags(self) -> dict[str, Any]:
        """Flags of fairseq that the model was trained with."""
        return {}

    @abstractmethod
    def in_segments_of(self, tokens: int) -> None:
        """Have a streaming model read segments of so many tokens."""

    @abstractmethod
    def lines(self, split: str) -> Sequence[Tensor]:
        """The lines of a split; UsageError when there is no such split."""

    def check_fits(self, flag: str, tokens: int) -> None:
        """Raise UsageError for a flag that asks for no tokens, or for more than the model has positions for."""
        if self.longest is not None and not 1 <= tokens <= self.longest:
            raise UsageError(
                f"{flag} must lie between 1 and the {self.longest} positions of {self.label}: got {tokens}"
            )
        if tokens < 1:
            raise UsageError(f"{flag} must have at least 1 token: got {tokens}")

    def documents(self, split: str, limit: int | None = None) -> list[Tensor]:
        """The token sequences of a split that are scored each on its own.

        All of a split is one sequence, unless it is read ``by_line``. ``limit`` cuts the split after so many tokens.
        Raises UsageError when there is no such split.
        """
        lines = self.lines(split)
        kept: list[Tensor] = []
        room = sys.maxsize if limit is None else limit
        for index in range(len(lines)):
            line = lines[index].long()
            if room <= 0 or (self.by_line and kept and line.numel() > room):
                break
            kept.append(line[:room])
            room -= line.numel()
        return kept if self.by_line else [torch.cat(kept)]

    def text(self, split: str, limit: int | None = None) -> Tensor:
        """All of a split as one sequence, as ``documents`` has it."""
        return torch.cat(self.documents(split, limit))

    def token_counts(self, split: str = "train") -> np.ndarray:
        """How often each symbol occurs in a split (V,), read line by line; UsageError when there is no such split."""
        lines = self.lines(split)
        counts = np.zeros(len(self.dictionary), dtype=np.int64)
        for index in range(len(lines)):
            np.add.at(counts, lines[index].numpy(), 1)
        return counts


def lines_of(tokens: Tensor, eos: int) -> list[Tensor]:
    """Tokens (n,) as lines, of which all but the last end in that of the end of a line."""
    ends = (tokens == eos).nonzero().flatten() + 1
    return [line for line in tokens.tensor_split(ends) if line.numel()]


def check_finite(model: nn.Module, path: object) -> None:
    """Raise UsageError for weights that are not all finite: nothing could be drawn from their logits."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UsageError(f"CHECKPOINT must have finite weights: {path} has NaN or infinity in {name}")


def on_device(model: nn.Module, cpu: bool) -> nn.Module:
    """A model in evaluation mode, on a GPU where there is one, unless it is to stay."""
    return (model.cuda() if torch.cuda.is_available() and not cpu else model).eval()
