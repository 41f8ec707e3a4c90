"""The state of models with a segment memory: between two segments (``Memory``) and inside one (``StreamState``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor

from fairseq_ms.core.cache import CannotTruncate, KeyValueCache, State

# Memories by name, (B, length, D) each: the states before a segment, m in the papers' figures.
Mems = dict[str, Tensor]


class SavedMemory(TypedDict):
    """A ``Memory`` as a dictionary of tensors, for checkpoints."""

    states: Mems
    pending: Tensor


@dataclass(frozen=True)
class Memory:
    """The past of B streams: memories at the last segment boundary, and the tokens after it.

    Attributes:
        states: memories by name, (B, length, D) each, without gradient
        pending_BT: tokens of an unfinished segment, fewer than segment_len; they are run again together with the tokens
            that follow, so that a stream may be cut anywhere
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
        """The memory with zeros for the rows that are True in (B,): these streams begin anew."""
        assert not self.pending_BT.size(1), "a stream is cut at a segment boundary"
        forgotten = rows_B[:, None, None]
        # Not multiplied by 0, which would keep NaN and infinity from an overflow.
        return Memory({name: state.masked_fill(forgotten, 0.0) for name, state in self.states.items()}, self.pending_BT)

    def finite(self) -> Memory:
        """The memory with zeros for streams that are not finite, since float16 overflows; never waits for the device.

        Otherwise every later segment that sees such a memory would overflow as well.
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
    """Concatenate states by name along time; names that ``earlier`` lacks have only their later states."""
    return {name: torch.cat([earlier[name], x], dim=1) if name in earlier else x for name, x in later.items()}


def shift(s_BTD: Tensor, m_BMD: Tensor) -> Tensor:
    """Move segment s into memory m, ``concat(m, s)[-n_m:]``, without gradient (Transformer-QL, Figure 2d)."""
    moving, length = s_BTD.size(1), m_BMD.size(1)
    if moving >= length:
        return s_BTD[:, moving - length :].detach()
    return torch.cat([m_BMD[:, moving:], s_BTD.detach()], dim=1)


class SegmentCache(KeyValueCache):
    """KV cache of a layer's memory and of the segment so far.

    Args:
        batch_size: B
        r_PNH: projected sinusoids of the window's distances, P = keys + 1
    """

    bias: Tensor | None = None

    def __init__(self, batch_size: int, r_PNH: Tensor) -> None:
        self.r_PNH = r_PNH
        distances, heads, head_dim = r_PNH.shape
        super().__init__(batch_size, heads, head_dim, distances - 1, r_PNH)

    def begin(self, k_BNMH: Tensor, v_BNMH: Tensor) -> None:
        """Begin a segment after a memory with these keys and values."""
        self.truncate(0)
        self.append(k_BNMH, v_BNMH)


# KV caches by the name of the layer's memory, for a segment that is read in pieces; empty for one read at once.
Pasts = Mapping[str, SegmentCache]
WHOLE: Pasts = MappingProxyType({})


class StreamState(State):
    """The memory of B streams and the segment that they are in.

    Without gradients, a whole segment is read in one pass, as in training, and a segment that arrives in pieces through
    KV caches. ``truncate`` reads the kept tokens again from ``start``, so it is exact for any length.

    Args:
        config: the model's configuration
        start: the memory to continue

    Attributes:
        start: the memory at the beginning, or after the last call with gradients
        read: the tokens since ``start``, in the pieces in which they arrived
        waiting_BT: the last of these tokens, if the next call has to run them (again) together with its own
        mems: the memory in front of the current segment
        done: number of positions of the current segment that have been read in pieces
        moving: the states of these positions, which will move into the memory
        before: ``mems``, with the states of pieces after those memories that no layer attends to
        caches: KV caches by the name of the layer's memory, made with the first piece
    """

    def __init__(self, config: Any, start: Memory) -> None:
        super().__init__(config, start.batch_size)
        self.caches: dict[str, SegmentCache] = {}
        self.restart(start, 0)

    @property
    def memory(self) -> Memory:
        """The past of the streams, to save or to begin another state with."""
        pending = self.done + self.waiting_BT.size(1)
        read_BT = torch.cat([self.start.pending_BT, *self.read], dim=1)
        return Memory(self.mems, read_BT[:, read_BT.size(1) - pending :])

    def restart(self, start: Memory, length: int) -> None:
        """Forget everything and continue a memory, whose streams are ``length`` tokens long."""
        self.start, self.first, self.length = start, length, length
        self.mems = self.before = start.states
        self.moving: Mems = {}
        self.waiting_BT, self.read = start.pending_BT, [start.pending_BT[:, :0]]
        self.done = 0

    def take(self, tokens_BT: Tensor) -> Tensor:
        """Remember the next tokens (B, T), and return them after those that wait, (B, W + T)."""
        # In a list, since joining would copy the whole stream for every token. A copy, since callers may reuse memory.
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
