"""Cached decoding of the streaming models, from the beginning of a stream or behind a memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairseq_ms.core.cache import Reorderable
from fairseq_ms.core.streaming.memory import Memory, Mems
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from fairseq_ms.lm.streaming import StreamingDecoder


class StreamState(DecodingState):
    """The state of a cached decoding: the memory at the last boundary and the segment in progress.

    A segment whose tokens come at once is run in one pass, as in training; one whose tokens come in pieces is what
    subclasses begin, advance and end. Going back starts again from ``start``, the memory the decoding began with,
    so it is always exact.

    Attributes:
        mems: what the segment in progress started from
        done: how many of its positions have come in pieces
        tokens_BT: those after ``start``
    """

    mems: Mems
    done: int
    tokens_BT: Tensor

    def __init__(self, decoder: StreamingDecoder, start: Memory) -> None:
        self.decoder = decoder
        self.start = start
        self._restart()

    @abstractmethod
    def begin(self) -> None:
        """Get ready for a segment in pieces, behind ``mems``."""

    @abstractmethod
    def advance(self, x_BTD: Tensor) -> Tensor:
        """Outputs (B, T, D) of the next T embedded tokens of the segment."""

    @abstractmethod
    def end(self) -> Mems:
        """The states after the segment, which is whole now."""

    @abstractmethod
    def parts(self) -> Iterable[Reorderable]:
        """What beam search has to reorder of a segment in progress, beside ``mems``."""

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        return self._feed(tokens_BT)

    def step(self, tokens_B1: Tensor) -> Tensor:
        return self._feed(tokens_B1)

    def reorder(self, order: Tensor) -> None:
        self.start = self.start.reorder(order)
        self.mems = {name: m.index_select(0, order) for name, m in self.mems.items()}
        self.tokens_BT = self.tokens_BT.index_select(0, order)
        if self.done:
            for part in self.parts():
                part.reorder(order)

    def truncate(self, length: int) -> None:
        if length == self.length:
            return
        tokens_BT = self.tokens_BT[:, :length]
        self._restart()
        if length:
            self._feed(tokens_BT)

    def _restart(self) -> None:
        self.mems = self.start.states
        self.done = 0
        if self.start.pending_BT.size(1):
            self._advance(self.start.pending_BT)
        self.tokens_BT = self.start.pending_BT[:, :0]
        self.length = 0

    def _feed(self, tokens_BT: Tensor) -> Tensor:
        self.tokens_BT = torch.cat([self.tokens_BT, tokens_BT], dim=1)
        self.length = self.tokens_BT.size(1)
        return self._advance(tokens_BT)

    def _advance(self, tokens_BT: Tensor) -> Tensor:
        """Features (B, T, D) of the next tokens of the stream."""
        outputs, segment_len = [], self.decoder.segment_len
        while tokens_BT.size(1):
            left = segment_len - self.done
            x_BTD, tokens_BT = self.decoder.embed_tokens(tokens_BT[:, :left]), tokens_BT[:, left:]
            if x_BTD.size(1) == segment_len:
                y_BTD, self.mems, _ = self.decoder.forward_segment(x_BTD, self.mems, self.decoder.sinusoids())
            else:
                if not self.done:
                    self.begin()
                y_BTD = self.advance(x_BTD)
                self.done += x_BTD.size(1)
                if self.done == segment_len:
                    self.mems, self.done = self.end(), 0
            outputs.append(y_BTD)
        return torch.cat(outputs, dim=1)


class Continuation:
    """A decoder whose new states continue a memory."""

    def __init__(self, decoder: StreamingDecoder, memory: Memory) -> None:
        self.decoder = decoder
        self.memory = memory

    def max_positions(self) -> int:
        return self.decoder.max_positions()

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        if batch_size != self.memory.batch_size:
            raise UsageError(f"memory: must be of {batch_size} streams, got {self.memory.batch_size}")
        return self.decoder.state_after(self.memory)
