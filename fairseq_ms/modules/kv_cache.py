"""Keys and values of the positions so far, in buffers that are filled in place."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Reorderable(Protocol):
    """Anything with rows that beam search can permute, repeat and drop."""

    def reorder(self, order: Tensor) -> None: ...


def is_identity(order: Tensor, batch_size: int) -> bool:
    """Whether reordering by ``order`` leaves every row where it is."""
    return order.numel() == batch_size and bool((order == torch.arange(batch_size, device=order.device)).all())


class Cache(Protocol):
    """What a self-attention layer reads besides its input: keys and values of the positions before.

    ``bias`` (B, 1, 1, S) hides keys that a row must not see; None lets each row see all of them.
    """

    @property
    def bias(self) -> Tensor | None: ...

    def append(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Add T positions; all keys and values so far, (B, N, S, H) each."""


class KeyValueCache:
    """Keys and values of one attention layer, (B, N, length, H) each, in buffers that are filled in place.

    Args:
        batch_size, heads, head_dim: B, N, H
        capacity: positions to allocate; the buffers double when they are full
        like: a tensor of the wanted type and device
    """

    bias = None

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
