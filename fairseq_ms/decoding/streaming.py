"""Cached decoding of the streaming models, from the beginning of a stream or behind a memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.errors import UsageError
from fairseq_ms.modules.streaming.memory import Memory

if TYPE_CHECKING:
    from fairseq_ms.lm.streaming import StreamingDecoder


class SegmentRun(Protocol):
    """A model at work on one segment."""

    length: int

    def reorder(self, order: Tensor) -> None: ...


class StreamState(DecodingState):
    """The state of a cached decoding: the memory at the last boundary and the segment in progress.

    Going back starts again from ``start``, the memory the decoding began with, so it is always exact.
    """

    def __init__(self, decoder: StreamingDecoder, start: Memory) -> None:
        self.decoder = decoder
        self.start = start
        self.distances: dict[str, Tensor] = {}
        self._restart()

    def _restart(self) -> None:
        self.states = self.start.states
        self.run: SegmentRun | None = None
        self.tokens_BT = self.start.pending_BT[:, :0]
        if self.start.pending_BT.size(1):
            self.decoder.feed(self.start.pending_BT, self)
            self.tokens_BT = self.tokens_BT[:, :0]

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.tokens_BT.size(1)

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        return self.decoder.feed(tokens_BT, self)

    def step(self, tokens_B1: Tensor) -> Tensor:
        return self.decoder.feed(tokens_B1, self)

    def reorder(self, order: Tensor) -> None:
        self.start = self.start.reorder(order)
        self.states = {name: state.index_select(0, order) for name, state in self.states.items()}
        self.tokens_BT = self.tokens_BT.index_select(0, order)
        if self.run is not None:
            self.run.reorder(order)

    def truncate(self, length: int) -> None:
        if length == self.length:
            return
        tokens_BT = self.tokens_BT[:, :length]
        self._restart()
        if length:
            self.decoder.feed(tokens_BT, self)


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
        return StreamState(self.decoder, self.memory)
