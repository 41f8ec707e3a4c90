"""The states of streams in buffers of fixed shapes: at the end of a segment, the memory moves on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.cache import Reorderable, State
from fairseq_ms.core.steps.buffers import FixedCache, FixedRows, FixedState, Slots
from fairseq_ms.core.stream_state import SegmentCache, StreamState
from fairseq_ms.core.streaming import StreamingModel
from fairseq_ms.core.transformer_ql import TransformerQL


class SegmentSlots(Slots):
    """Those of a memory and the segment after it, whose next token is at ``position_1`` among them.

    Attributes:
        row_P: in the projected sinusoids of the window, the distance of each place, once a step has begun
    """

    row_P: Tensor

    def __init__(self, position_1: Tensor, window: int, like: Tensor) -> None:
        super().__init__(position_1, window, like)
        # One more, which relative attention leaves out.
        self.window, self.all_P = window, torch.arange(self.capacity + 1, device=like.device)

    def begin(self, phase: int) -> None:
        super().begin(phase)
        self.row_P = (self.all_P + (self.window - 1) - self.position_1).clamp(max=self.window)


class FixedSegment(FixedCache):
    """A ``SegmentCache`` that takes one position a step."""

    slots: SegmentSlots

    def __init__(self, cache: SegmentCache, slots: SegmentSlots) -> None:
        super().__init__(cache, slots)
        self.cache = cache

    @property
    def bias(self) -> Tensor:
        return self.slots.bias

    @property
    def r_PNH(self) -> Tensor:
        """The projected sinusoid of the distance of each place."""
        return self.cache.r_PNH.index_select(0, self.slots.row_P)

    def begin(self, k_BNMH: Tensor, v_BNMH: Tensor) -> None:
        """Begin a segment after a memory, of which these are the keys and values."""
        for part, own in zip(self.buffer, (k_BNMH, v_BNMH)):
            part[:, :, : own.size(2)].copy_(own)


class _FixedStreams(FixedState):
    """What states of streams have in common.

    Args:
        model: whose state it is
        batch_size: B
        growing: the caches of all layers, as a ``StreamState`` has them
        lengths: by the names of what moves into the memory, how many states a whole segment has of it

    Attributes:
        mems: as in ``StreamState``
        moving: what the segment has so far, with room for a whole one
        done: how many tokens there were in the segment when the state was loaded, less those before
    """

    caches: dict[str, Any]

    def __init__(self, model: Any, batch_size: int, growing: dict[str, SegmentCache], lengths: dict[str, int]) -> None:
        super().__init__(model.config, batch_size)
        self.model, self.growing, self.done = model, growing, 0
        self.mems = {name: FixedRows(x.clone()) for name, x in model.new_memory(batch_size).states.items()}
        shapes = {name: (batch_size, count, model.config.dim) for name, count in lengths.items()}
        self.moving = {name: FixedRows(model.u.new_zeros(shape)) for name, shape in shapes.items()}

    def move_on(self, count: int) -> None:
        """Nothing: ``step`` does it."""

    def place(self, length: int) -> int:
        """The place in its segment of the token after so many."""
        return (length + self.done) % self.model.segment_len

    @torch.no_grad()
    def load(self, state: State) -> None:
        assert isinstance(state, StreamState)
        if state.waiting_BT.size(1):
            self.model.advance(state.waiting_BT[:, :0], state)
        self.done = state.done - state.length
        for name, x in state.mems.items():
            self.mems[name].put(x)
            if state.done:
                moving = state.moving[name]
                self.moving[name].x[:, : moving.size(1)].copy_(moving)
        positions_PD = self.model.sinusoids()
        for layer in self.model.memory_layers():
            # The weights may be others than they were.
            self.growing[layer.name].r_PNH.copy_(layer.attention.project(positions_PD))

    def begin_segment(self) -> None:
        """Have the caches begin after the memory."""
        for layer in self.model.memory_layers():
            self.caches[layer.name].begin(*layer.attention.of_memory(self.mems[layer.name].x))

    def end_segment(self) -> None:
        """Move the segment into the memory."""
        moving, mems = ({name: rows.x for name, rows in own.items()} for own in (self.moving, self.mems))
        after, _ = self.model.remember(moving, mems)
        for name, x in after.items():
            self.mems[name].put(x)


class FixedStream(_FixedStreams):
    """With two kinds of steps: at the end of a segment, the memory moves on.

    Attributes:
        position_1: where the next token is after the memory's states
    """

    def __init__(self, model: StreamingModel, batch_size: int, capacity: int) -> None:
        caches = model.segment_caches(batch_size)
        super().__init__(model, batch_size, caches, dict.fromkeys(caches, model.segment_len))
        self.past = model.window - model.segment_len
        self.position_1 = torch.full((1,), self.past, device=model.u.device)
        self.places = [slots := SegmentSlots(self.position_1, model.window, model.u)]
        self.caches = {name: FixedSegment(cache, slots) for name, cache in caches.items()}

    def parts(self) -> Iterable[Reorderable]:
        return [*self.mems.values(), *self.moving.values(), *self.caches.values()]

    def kind(self, length: int) -> int:
        # Whether a segment ends.
        return int(self.place(length + 1) == 0)

    @torch.no_grad()
    def load(self, state: Any) -> None:
        super().load(state)
        self.position_1.fill_(self.past + state.done)
        for cache in self.caches.values():
            # What follows the memory is masked, which hides no NaN.
            cache.buffer.zero_()
        self.begin_segment()
        for name, cache in self.caches.items() if state.done else ():
            cache.load(state.caches[name])

    @torch.no_grad()
    def step(self, model: StreamingModel, tokens_B1: Tensor) -> Tensor:
        mems = {name: rows.x for name, rows in self.mems.items()}
        y_B1D, moving = model.forward_segment(model.embed_tokens(tokens_B1), mems, model.u, self.caches)
        for name, x_B1D in moving.items():
            self.moving[name].x.index_copy_(1, self.position_1 - self.past, x_B1D)
        self.position_1 += 1
        if self.length:
            self.end_segment()
            self.begin_segment()
            self.position_1.fill_(self.past)
        return y_B1D


class PhasedStream(_FixedStreams):
    """With a kind of step for every place in a segment, for a model whose scales move on at different tokens.

    The place says how many states each scale has by then, so a step does what ``StreamingModel.advance`` does with a
    piece of one token, in slices of known lengths; no mask is needed.
    """

    def __init__(self, model: TransformerQL, batch_size: int, capacity: int) -> None:
        self.caches = model.segment_caches(batch_size)
        super().__init__(model, batch_size, self.caches, model.done(model.segment_len))
        self.position_1 = torch.zeros(1, dtype=torch.long, device=model.u.device)

    def parts(self) -> Iterable[Reorderable]:
        buffers = [FixedRows(cache.buffer.transpose(0, 1)) for cache in self.caches.values()]
        return [*self.mems.values(), *self.moving.values(), *buffers]

    def kind(self, length: int) -> int:
        return self.place(length)

    @torch.no_grad()
    def load(self, state: Any) -> None:
        super().load(state)
        for name, cache in self.caches.items() if state.done else ():
            cache.begin(*state.caches[name].kept()[0])

    @torch.no_grad()
    def step(self, model: TransformerQL, tokens_B1: Tensor) -> Tensor:
        mems, done = {name: rows.x for name, rows in self.mems.items()}, model.done(self.length)
        if not self.length:
            self.begin_segment()
        for name, m_BMD in mems.items():
            if name in self.caches:
                self.caches[name].length = m_BMD.size(1) + done[name]
            else:
                mems[name] = torch.cat([m_BMD, self.moving[name].x[:, : done[name]]], dim=1)
        y_B1D, moving = model.forward_segment(model.embed_tokens(tokens_B1), mems, model.u, self.caches)
        for name, x_BTD in moving.items():
            self.moving[name].x[:, done[name] : done[name] + x_BTD.size(1)] = x_BTD
        if self.length == model.segment_len - 1:
            self.end_segment()
        return y_B1D
