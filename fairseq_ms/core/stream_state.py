"""The state of models with a segment memory: at a segment's end (``Memory``), and within one (``StreamState``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor

from fairseq_ms.core.cache import CannotTruncate, KeyValueCache, State

# Memories (B, M, D) by name: states before a segment, m in the papers' figures.
Mems = dict[str, Tensor]


class SavedMemory(TypedDict):
    """A ``Memory`` as a dictionary of tensors, for checkpoints."""

    states: Mems
    pending: Tensor


@dataclass(frozen=True)
class Memory:
    """The past of B streams: memories at the end of the last whole segment, and the tokens after it.

    Attributes:
        states: memories (B, M, D) by name, without gradient
        pending_BT: tokens of an unfinished segment, fewer than segment_len; the model runs them again together with
            the next tokens, so that a stream may be cut anywhere
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
        """The memory with zeros in the rows that are True in (B,), whose streams begin anew."""
        assert not self.pending_BT.size(1), "streams begin anew at a segment's end"
        forgotten = rows_B[:, None, None]
        # Not multiplied by 0, which would keep NaN and infinity from an overflow.
        return Memory({name: state.masked_fill(forgotten, 0.0) for name, state in self.states.items()}, self.pending_BT)

    def finite(self) -> Memory:
        """The memory with zeros for streams that are not finite, as float16 overflows; does not wait for a GPU.

        Otherwise every later segment of these streams would overflow as well.
        """
        if all(state.dtype != torch.float16 for state in self.states.values()):
            return self
        overflown = [~state.isfinite().flatten(1).all(1) for state in self.states.values()]
        return self.forget(torch.stack(overflown).any(0))

    def to(self, like: Tensor) -> Memory:
        """The memory on the device and of the floating point type of ``like``."""
        states = {name: state.to(like) for name, state in self.states.items()}
        return Memory(states, self.pending_BT.to(like.device))

    def cpu(self) -> Memory:
        """The memory on the CPU."""
        return Memory({name: state.cpu() for name, state in self.states.items()}, self.pending_BT.cpu())

    def state_dict(self) -> SavedMemory:
        """Copies of all tensors on the CPU, for a checkpoint."""
        states = {name: state.detach().cpu().clone() for name, state in self.states.items()}
        return {"states": states, "pending": self.pending_BT.cpu().clone()}

    @classmethod
    def from_state_dict(cls, saved: SavedMemory) -> Memory:
        """The inverse of ``state_dict``."""
        return cls(dict(saved["states"]), saved["pending"])


def join(earlier: Mems, later: Mems) -> Mems:
    """Append states to earlier ones of the same name, if there are any, along time."""
    return {name: torch.cat([earlier[name], x], dim=1) if name in earlier else x for name, x in later.items()}


def shift(s_BTD: Tensor, m_BMD: Tensor) -> Tensor:
    """Shift: move a segment into the memory, ``concat(m, s)[-n_m:]``, without gradient (Transformer-QL, Figure 2d)."""
    moving, length = s_BTD.size(1), m_BMD.size(1)
    if moving >= length:
        return s_BTD[:, moving - length :].detach()
    return torch.cat([m_BMD[:, moving:], s_BTD.detach()], dim=1)


class SegmentCache(KeyValueCache):
    """KV cache of a layer's memory and of the segment so far; ``r`` are projected sinusoids of a window's distances."""

    def __init__(self, batch_size: int, r_PNH: Tensor) -> None:
        self.r_PNH = r_PNH
        distances, heads, head_dim = r_PNH.shape
        super().__init__(batch_size, heads, head_dim, distances - 1, r_PNH)

    def begin(self, pair_2BNMH: Tensor) -> None:
        """Begin a segment, after the keys and values of a memory."""
        self.truncate(0)
        self.append(pair_2BNMH)


# KV caches by the name of the layer's memory, for a segment that is read in pieces; none for one that is read at once.
Pasts = Mapping[str, SegmentCache]
WHOLE: Pasts = MappingProxyType({})


class StreamState(State):
    """The memory of B streams, and how far they are in the current segment.

    Without gradients, a segment that comes whole is read in one pass, as in training, and one that comes in pieces
    through KV caches. ``truncate`` is exact for any length: the next call reads the tokens since ``start`` again.

    Attributes:
        start: the memory at the beginning, or after the last call with gradients
        read: the tokens since ``start``, in the pieces in which they came
        waiting_BT: the last of these tokens, if the next call has to run them together with its own
        mems: the memories before the current segment
        done: positions of the current segment that have been read in pieces
        moving: the states of these positions, which will move into the memories
        before: ``mems``, in which memories that no layer attends to also have the states of the pieces
        caches: KV caches by the name of the layer's memory, made with the first piece
    """

    def __init__(self, config: Any, start: Memory) -> None:
        super().__init__(config, start.batch_size)
        self.caches: dict[str, SegmentCache] = {}
        self.restart(start, 0)

    @property
    def memory(self) -> Memory:
        """The past of the streams, to be saved or continued by another state."""
        pending = self.done + self.waiting_BT.size(1)
        read_BT = torch.cat([self.start.pending_BT, *self.read], dim=1)
        return Memory(self.mems, read_BT[:, read_BT.size(1) - pending :])

    def restart(self, start: Memory, length: int) -> None:
        """Forget everything, and continue a memory whose streams are ``length`` tokens long."""
        self.start, self.first, self.length = start, length, length
        self.mems = self.before = start.states
        self.moving: Mems = {}
        self.waiting_BT, self.read = start.pending_BT, [start.pending_BT[:, :0]]
        self.done = 0

    def take(self, tokens_BT: Tensor) -> Tensor:
        """Remember the next tokens (B, T); returns those that wait followed by these, (B, waiting + T)."""
        # A list, since concatenation would copy the stream at every token. A copy, since callers may reuse memory.
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
        # The next call runs the kept tokens again.
        self.waiting_BT = self.take(tokens_BT)
