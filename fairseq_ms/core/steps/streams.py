"""The state of Transformer-XL and the Compressive Transformer in buffers of fixed shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.cache import Reorderable, State
from fairseq_ms.core.steps.buffers import FixedCache, FixedRows, FixedState, Slots, state_of
from fairseq_ms.core.stream_state import SegmentCache, StreamState
from fairseq_ms.core.streaming import StreamingModel
from fairseq_ms.core.transformer_xl import TransformerXL


class SegmentSlots(Slots):
    """The places of a memory and of the segment after it; ``position_1`` is the next token's place.

    Attributes:
        row_P: for each place, the row of its distance from the query in the projected sinusoids; set by ``begin``
    """

    row_P: Tensor

    def __init__(self, position_1: Tensor, window: int, like: Tensor) -> None:
        super().__init__(position_1, window, like)
        # One place more, since relative attention drops the last column.
        self.window, self.all_P = window, torch.arange(self.capacity + 1, device=like.device)

    def begin(self, phase: int) -> None:
        super().begin(phase)
        self.row_P = (self.all_P + (self.window - 1) - self.position_1).clamp(max=self.window)


class FixedSegment(FixedCache):
    """A ``SegmentCache`` in a buffer of fixed size and address, which takes one position a step."""

    slots: SegmentSlots

    def __init__(self, cache: SegmentCache, slots: SegmentSlots) -> None:
        super().__init__(cache, slots)
        self.r_of_window_PNH = cache.r_PNH.detach().clone()

    @property
    def r_PNH(self) -> Tensor:
        """The projected sinusoids of the distances from the query to all places."""
        return self.r_of_window_PNH.index_select(0, self.slots.row_P)


@state_of(TransformerXL)
class FixedStream(FixedState):
    """Memories and the segment after them. A step of kind 1 ends a segment, whose states then move into the memories.

    Attributes:
        position_1: the place of the next token, after those of the memory
        mems: the memories by name
        moving: the states of the segment so far, by the same names, (B, segment_len, D)
        done: plus the number of tokens read, modulo ``segment_len``, the next token's place in its segment
    """

    def __init__(self, model: StreamingModel, batch_size: int, capacity: int) -> None:
        super().__init__(model.config, batch_size)
        like, self.model, self.done = model.u.detach(), model, 0
        self.past = model.window - model.segment_len
        self.position_1 = torch.full((1,), self.past, device=like.device)
        self.places = [slots := SegmentSlots(self.position_1, model.window, like)]
        growing = model.segment_caches(like.new_empty(batch_size, 0, 0))
        self.caches: dict[str, Any] = {name: FixedSegment(cache, slots) for name, cache in growing.items()}
        self.mems = {name: FixedRows(x) for name, x in model.new_memory(batch_size).states.items()}
        shape = batch_size, model.segment_len, model.config.dim
        self.moving = {name: FixedRows(like.new_zeros(shape)) for name in self.caches}

    def parts(self) -> Iterable[Reorderable]:
        return [*self.mems.values(), *self.moving.values(), *self.caches.values()]

    def kind(self, length: int) -> int:
        return int((length + 1 + self.done) % self.model.segment_len == 0)

    @torch.no_grad()
    def load(self, state: State) -> None:
        assert isinstance(state, StreamState)
        if state.waiting_BT.size(1):
            self.model.advance(state.waiting_BT[:, :0], state)
        self.done = state.done - state.length
        self.position_1.fill_(self.past + state.done)
        for name, x in state.mems.items():
            self.mems[name].put(x)
        positions_PD = self.model.sinusoids(self.model.u)
        for layer in self.model.memory_layers():
            cache = self.caches[layer.name]
            cache.buffer.zero_()
            # Weights may have changed since the buffers were made.
            cache.r_of_window_PNH.copy_(layer.attention.project(positions_PD))
        self.begin_segment()
        for name, x in state.moving.items() if state.done else ():
            self.moving[name].x[:, : x.size(1)].copy_(x)
            self.caches[name].load(state.caches[name])

    @torch.no_grad()
    def step(self, model: StreamingModel, tokens_B1: Tensor) -> Tensor:
        mems = {name: rows.x for name, rows in self.mems.items()}
        y_B1D, moving = model.forward_segment(model.embed_tokens(tokens_B1), mems, model.u, self.caches)
        for name, x_B1D in moving.items():
            self.moving[name].x.index_copy_(1, self.position_1 - self.past, x_B1D)
        self.move_on(1)
        if self.length:
            after, _ = model.remember({name: rows.x for name, rows in self.moving.items()}, mems)
            for name, x in after.items():
                self.mems[name].put(x)
            self.begin_segment()
            self.position_1.fill_(self.past)
        return y_B1D

    def begin_segment(self) -> None:
        """Write the memories' keys and values, in front of the segment's."""
        for layer in self.model.memory_layers():
            pair = layer.attention.of_memory(self.mems[layer.name].x)
            self.caches[layer.name].buffer[:, :, :, : pair.size(3)].copy_(pair)
