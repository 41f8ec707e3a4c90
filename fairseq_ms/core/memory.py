"""What a model with a memory remembers of a stream: between two segments, and inside one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from fairseq_ms.core.cache import CannotTruncate, Reorderable, State
from fairseq_ms.core.fixed import FixedCache, FixedRows, Slots

if TYPE_CHECKING:
    from fairseq_ms.core.streaming import SegmentCache, StreamingModel

# The states a segment starts from, by name, (B, length, D) each: m of the papers' figures.
Mems = dict[str, Tensor]


class SavedMemory(TypedDict):
    """A memory as a checkpoint holds it."""

    states: Mems
    pending: Tensor


@dataclass(frozen=True)
class Memory:
    """The past of B streams: states of all layers at the last segment boundary, and what came after it.

    Attributes:
        states: by name, (B, length, D) each, without gradient
        pending_BT: the tokens of the segment in progress, fewer than a segment; they are run over again
            together with what follows, so that a stream may be cut anywhere
    """

    states: Mems
    pending_BT: Tensor

    @property
    def batch_size(self) -> int:
        return self.pending_BT.size(0)

    def reorder(self, order: Tensor) -> Memory:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows."""
        states = {name: state.index_select(0, order) for name, state in self.states.items()}
        return Memory(states, self.pending_BT.index_select(0, order))

    def forget(self, rows_B: Tensor) -> Memory:
        """The memory with the streams that are True in ``rows`` at their beginning again."""
        assert not self.pending_BT.size(1), "a stream is cut at a segment boundary"
        forgotten = rows_B[:, None, None]
        # Not by a product: a forward pass that overflowed leaves what is not finite.
        return Memory({name: state.masked_fill(forgotten, 0.0) for name, state in self.states.items()}, self.pending_BT)

    def finite(self) -> Memory:
        """The memory with the streams at their beginning again that have overflowed, as half precision can.

        They would make every pass overflow that still sees them. Nothing waits for the device.
        """
        if all(state.dtype != torch.float16 for state in self.states.values()):
            return self
        overflown = [~state.isfinite().flatten(1).all(1) for state in self.states.values()]
        return self.forget(torch.stack(overflown).any(0))

    def to(self, like: Tensor) -> Memory:
        """On the device and of the floating point type of ``like``."""
        states = {name: state.to(like) for name, state in self.states.items()}
        return Memory(states, self.pending_BT.to(like.device))

    def cpu(self) -> Memory:
        """On the CPU."""
        return Memory({name: state.cpu() for name, state in self.states.items()}, self.pending_BT.cpu())

    def state_dict(self) -> SavedMemory:
        """Tensors in a dictionary, in memory of their own and on the CPU, for a checkpoint."""
        states = {name: state.detach().cpu().clone() for name, state in self.states.items()}
        return {"states": states, "pending": self.pending_BT.cpu().clone()}

    @classmethod
    def from_state_dict(cls, saved: SavedMemory) -> Memory:
        """The inverse of ``state_dict``."""
        states = dict(saved["states"])
        # Checkpoints used to have a name of its own for the compressed part of a layer's memory.
        for name in [name for name in states if name.startswith("compressed")]:
            layer = name.replace("compressed", "layer")
            states[layer] = torch.cat([states.pop(name), states[layer]], dim=1)
        return cls(states, saved["pending"])


def join(earlier: Mems, later: Mems) -> Mems:
    """States by name behind those of the same name that came before them, if any did."""
    return {name: torch.cat([earlier[name], x], dim=1) if name in earlier else x for name, x in later.items()}


class StreamState(State):
    """A memory, and where its streams are in their segment.

    Without gradients, a segment whose tokens come at once is run in one pass, as in training, and one whose tokens
    come in pieces through caches. Going back starts again from ``start``, so it is always exact.

    Attributes:
        start: the memory it began with, or that the last call with gradients left
        read: the tokens after ``start``, in the pieces in which they came
        mems: what the segment in progress starts from
        done: how many of its positions have come in pieces
    """

    def __init__(self, model: StreamingModel, start: Memory) -> None:
        super().__init__(model.config, start.batch_size)
        self.model = model
        self.caches: dict[str, SegmentCache] = {}
        self.restart(start, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamState:
        # A copy goes on with the same model, whose parts its caches know, too, unless that is copied along with it.
        copied = copy.copy(self)
        copied.__dict__ = copy.deepcopy(self.__dict__, {id(part): part for part in self.model.modules()} | memo)
        return copied

    @property
    def memory(self) -> Memory:
        """What it knows of its streams, for a checkpoint or another state."""
        pending = self.done + self.waiting_BT.size(1)
        read_BT = torch.cat([self.start.pending_BT, *self.read], dim=1)
        return Memory(self.mems, read_BT[:, read_BT.size(1) - pending :])

    def restart(self, start: Memory, length: int) -> None:
        """Continue a memory, which is that after ``length`` tokens."""
        self.start, self.first, self.length = start, length, length
        self.mems = self.before = start.states
        self.moving: Mems = {}
        self.waiting_BT, self.read = start.pending_BT, [start.pending_BT[:, :0]]
        self.done = 0

    @torch.no_grad()
    def advance(self, tokens_BT: Tensor) -> Tensor:
        """Outputs (B, T, D) of the next tokens of the streams."""
        # Not joined here, which would copy a stream again for every token; nor the caller's, who may write into it.
        self.read.append(tokens_BT.clone())
        self.length += tokens_BT.size(1)
        known, tokens_BT = self.waiting_BT.size(1), torch.cat([self.waiting_BT, tokens_BT], dim=1)
        self.waiting_BT = tokens_BT[:, :0]
        outputs, model = [], self.model
        while tokens_BT.size(1):
            left = model.segment_len - self.done
            x_BTD, tokens_BT = model.embed_tokens(tokens_BT[:, :left]), tokens_BT[:, left:]
            if x_BTD.size(1) == model.segment_len:
                y_BTD, moving = model.forward_segment(x_BTD, self.mems, model.sinusoids())
                self.mems, _ = model.remember(moving, self.mems)
            else:
                y_BTD = self._piece(x_BTD)
            outputs.append(y_BTD)
        return torch.cat(outputs, dim=1)[:, known:]

    def _piece(self, x_BTD: Tensor) -> Tensor:
        """Outputs of the next positions of a segment that comes in pieces."""
        model = self.model
        self.caches = self.caches or model.segment_caches(x_BTD.size(0))
        if not self.done:
            self.before, self.moving = self.mems, {}
            for name, cache in self.caches.items():
                cache.begin(self.mems[name])
        y_BTD, moving = model.forward_segment(x_BTD, self.before, model.sinusoids(), self.caches)
        self.moving = join(self.moving, moving)
        self.before = self.before | join(self.before, {n: s for n, s in moving.items() if n not in self.caches})
        self.done += x_BTD.size(1)
        if self.done == model.segment_len:
            self.mems, _ = model.remember(self.moving, self.mems)
            self.done = 0
        return y_BTD

    def fixed(self, capacity: int) -> State:
        return self.model.fixed_state(self.model, self.batch_size)

    def parts(self) -> Iterable[SegmentCache]:
        return self.caches.values()

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.start = self.start.reorder(order)
        self.mems, self.moving, self.before = (
            {name: x.index_select(0, order) for name, x in states.items()}
            for states in (self.mems, self.moving, self.before)
        )
        self.waiting_BT = self.waiting_BT.index_select(0, order)
        self.read = [torch.cat(self.read, dim=1).index_select(0, order)]

    def truncate(self, length: int) -> None:
        if length == self.length:
            return
        if length < self.first:
            raise CannotTruncate(f"length must be at least {self.first}, before which all is forgotten: got {length}")
        tokens_BT = torch.cat(self.read, dim=1)[:, : length - self.first]
        self.restart(self.start, self.first)
        if tokens_BT.size(1):
            self.advance(tokens_BT)


class SegmentSlots(Slots):
    """Those of a memory and the segment behind it, whose next token is at ``position_1`` among them.

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

    def begin(self, m_BMD: Tensor) -> None:
        """Begin a segment behind a memory."""
        for part, own in zip(self.buffer, self.cache.of_memory(m_BMD)):
            part[:, :, : m_BMD.size(1)].copy_(own)


class FixedStream(State):
    """The state of streams in buffers of fixed shapes: at the end of a segment, the memory moves on.

    Attributes:
        length: where the next token is behind the memory's states
        mems: as in ``StreamState``
        moving: by the layers' names, what they have read of the segment
        done: how many tokens there were in the segment when the state was loaded, less those before
    """

    def __init__(self, model: StreamingModel, batch_size: int) -> None:
        super().__init__(model.config, batch_size)
        self.model, self.done = model, 0
        self.past = model.window - model.segment_len
        self.length = torch.full((1,), self.past, device=model.u.device)
        self.places = [slots := SegmentSlots(self.length, model.window, model.u)]
        self.caches: Any = {n: FixedSegment(cache, slots) for n, cache in model.segment_caches(batch_size).items()}
        self.mems = {name: FixedRows(x.clone()) for name, x in model.new_memory(batch_size).states.items()}
        shape = batch_size, model.segment_len, model.config.dim
        self.moving = {name: FixedRows(model.u.new_zeros(shape)) for name in self.caches}

    def parts(self) -> Iterable[Reorderable]:
        return [*self.mems.values(), *self.moving.values(), *self.caches.values()]

    def kind(self, length: int) -> int:
        # Whether a segment ends.
        return int((length + self.done + 1) % self.model.segment_len == 0)

    @torch.no_grad()
    def load(self, state: State) -> None:
        assert isinstance(state, StreamState)
        assert not state.waiting_BT.size(1)
        self.length.fill_(self.past + state.done)
        self.done = state.done - state.length
        for name, x in state.mems.items():
            self.mems[name].put(x)
        positions = self.model.sinusoids()
        for name, cache in self.caches.items():
            # The weights may be others than they were.
            cache.cache.r_PNH.copy_(cache.cache.attention.project(positions))
            cache.begin(state.mems[name])
            if state.done:
                cache.load(state.caches[name])
                self.moving[name].x[:, : state.done].copy_(state.moving[name])

    @torch.no_grad()
    def advance(self, tokens_B1: Tensor) -> Tensor:
        """Outputs (B, 1, D) of the next token of the streams."""
        model, mems = self.model, {name: rows.x for name, rows in self.mems.items()}
        y_B1D, moving = model.forward_segment(model.embed_tokens(tokens_B1), mems, model.u, self.caches)
        for name, x_B1D in moving.items():
            self.moving[name].x.index_copy_(1, self.length - self.past, x_B1D)
        self.length += 1
        if self.phase:
            after, _ = model.remember({name: rows.x for name, rows in self.moving.items()}, mems)
            for name, x in after.items():
                self.mems[name].put(x)
                self.caches[name].begin(x)
            self.length.fill_(self.past)
        return y_B1D
