"""What a model with a memory remembers of a stream: between two segments, and inside one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor

from fairseq_ms.core.cache import CannotTruncate, KeyValueCache, State

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
        return cls(dict(saved["states"]), saved["pending"])


def join(earlier: Mems, later: Mems) -> Mems:
    """States by name after those of the same name that came before them, if any did."""
    return {name: torch.cat([earlier[name], x], dim=1) if name in earlier else x for name, x in later.items()}


def shift(s_BTD: Tensor, m_BMD: Tensor) -> Tensor:
    """Shift of Transformer-QL, Figure 2d: ``concat(m, s)[-n_m:]``, the memory once s has moved in; no gradient."""
    moving, length = s_BTD.size(1), m_BMD.size(1)
    if moving >= length:
        return s_BTD[:, moving - length :].detach()
    return torch.cat([m_BMD[:, moving:], s_BTD.detach()], dim=1)


class SegmentCache(KeyValueCache):
    """Keys and values of a layer's memory and of its segment so far.

    Args:
        batch_size: B
        r_PNH: the projected sinusoids of a window, one more than it has keys
    """

    bias: Tensor | None = None

    def __init__(self, batch_size: int, r_PNH: Tensor) -> None:
        self.r_PNH = r_PNH
        distances, heads, head_dim = r_PNH.shape
        super().__init__(batch_size, heads, head_dim, distances - 1, r_PNH)

    def begin(self, k_BNMH: Tensor, v_BNMH: Tensor) -> None:
        """Begin a segment after a memory, of which these are the keys and values."""
        self.truncate(0)
        self.append(k_BNMH, v_BNMH)


# By the name of a layer's memory, its cache in a segment that comes in pieces.
Pasts = Mapping[str, SegmentCache]
WHOLE: Pasts = MappingProxyType({})


class StreamState(State):
    """A memory, and where its streams are in their segment.

    Without gradients, a segment whose tokens come at once is run in one pass, as in training, and one whose tokens
    come in pieces through caches. Going back starts again from ``start``, so it is always exact.

    Args:
        config: that of its model
        start: the memory to continue

    Attributes:
        start: the memory it began with, or that the last call with gradients left
        read: the tokens after ``start``, in the pieces in which they came
        waiting_BT: those of them that are to be run over again together with what follows
        mems: what the segment in progress starts from
        done: how many of its positions have come in pieces
        moving: the states that these have left for the memory
        before: what the next piece starts from
        caches: by the name of a layer's memory, once there have been pieces
    """

    def __init__(self, config: Any, start: Memory) -> None:
        super().__init__(config, start.batch_size)
        self.caches: dict[str, SegmentCache] = {}
        self.restart(start, 0)

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

    def take(self, tokens_BT: Tensor) -> Tensor:
        """Take in the next tokens; these after all that wait."""
        # Not joined here, which would copy a stream again for every token; nor the caller's, who may write into it.
        self.read.append(tokens_BT.clone())
        self.move_on(tokens_BT.size(1))
        waiting_BT, self.waiting_BT = self.waiting_BT, tokens_BT[:, :0]
        return torch.cat([waiting_BT, tokens_BT], dim=1)

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
        if not self.first <= length <= self.length:
            raise CannotTruncate(f"length must be from {self.first} to {self.length}, which are known: got {length}")
        tokens_BT = torch.cat(self.read, dim=1)[:, : length - self.first]
        self.restart(self.start, self.first)
        # What is kept is run over again by the next call.
        self.waiting_BT = self.take(tokens_BT)
