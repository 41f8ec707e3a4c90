"""What cached decoding remembers: explicit objects with preallocated buffers.

A state is created by a model, passed to every step and changed in place by it; nothing hides in a module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class CannotTruncate(Exception):
    """A state has forgotten what it would need to go back; the caller starts from the tokens again."""


class Reorderable(Protocol):
    """Anything with rows that beam search can permute, repeat and drop."""

    def reorder(self, order: Tensor) -> None: ...


class DecodingState(ABC):
    """The state of a model after ``length`` tokens of every row of a batch."""

    length: int

    @abstractmethod
    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows.

        The caller leaves out an order that changes nothing: to find out costs a wait for the GPU, once for everything.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Go back to the state after ``length`` tokens; raises ``CannotTruncate`` if that is forgotten."""


def is_identity(order: Tensor, batch_size: int) -> bool:
    """Whether reordering by ``order`` leaves every row where it is."""
    return order.numel() == batch_size and bool((order == torch.arange(batch_size, device=order.device)).all())


class KeyValueCache:
    """Keys and values of one attention layer, (B, N, length, H) each, in buffers that are filled in place.

    Args:
        batch_size, heads, head_dim: B, N, H
        capacity: positions to allocate; the buffers double when they are full
        like: a tensor of the wanted type and device
    """

    def __init__(self, batch_size: int, heads: int, head_dim: int, capacity: int, like: Tensor) -> None:
        shape = (2, batch_size, heads, max(capacity, 1), head_dim)
        self.buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.length = 0

    @property
    def batch_size(self) -> int:
        return self.buffer.size(1)

    @property
    def keys(self) -> Tensor:
        """The keys so far, a view (B, N, length, H)."""
        return self.buffer[0, :, :, : self.length]

    @property
    def values(self) -> Tensor:
        """The values so far, a view (B, N, length, H)."""
        return self.buffer[1, :, :, : self.length]

    def append(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Add T positions; returns all keys and values so far, as views."""
        end = self.length + k_BNTH.size(2)
        if end > self.buffer.size(3):
            self._grow(end)
        self.buffer[0, :, :, self.length : end] = k_BNTH
        self.buffer[1, :, :, self.length : end] = v_BNTH
        self.length = end
        return self.keys, self.values

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        two, _, heads, capacity, head_dim = self.buffer.shape
        buffer = self.buffer.new_empty(two, order.numel(), heads, capacity, head_dim)
        buffer[:, :, :, : self.length] = self.buffer[:, :, :, : self.length].index_select(1, order)
        self.buffer = buffer

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on."""
        assert 0 <= length <= self.length
        self.length = length

    def _grow(self, needed: int) -> None:
        two, batch_size, heads, capacity, head_dim = self.buffer.shape
        buffer = self.buffer.new_empty(two, batch_size, heads, max(needed, 2 * capacity), head_dim)
        buffer[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
        self.buffer = buffer


class StackState(DecodingState):
    """The state of a stack of attention layers: a cache a layer, all of the same length."""

    def __init__(self, caches: Sequence[KeyValueCache]) -> None:
        self.caches = list(caches)

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.caches[0].length

    def reorder(self, order: Tensor) -> None:
        for cache in self.caches:
            cache.reorder(order)

    def truncate(self, length: int) -> None:
        for cache in self.caches:
            cache.truncate(length)
