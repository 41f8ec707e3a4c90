"""Who may attend to whom: small objects, all of one polarity (True = may attend).

A mask answers for query positions and key positions given as integer tensors, so the same object
serves full sequences, blocks of queries and single decoding steps::

    Window(0, 3)         Blocks(2, near=2, far=6)
    k 0 1 2 3 4          block 0 1 2   (block j covers positions 2j, 2j+1)
    q0 x . . . .         q0    . . .
    q1 x x . . .         q1    . . .
    q2 x x x . .         q2    x . .
    q3 . x x x .         q3    x . .
    q4 . . x x x         q4    x x .
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Mask(ABC):
    """A relation between query and key positions; True = may attend."""

    @abstractmethod
    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Boolean tensor, broadcast of the positions ``queries`` (..., Q, 1) and ``keys`` (..., 1, S)."""

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask as an additive attention bias: 0 where visible, -inf elsewhere."""
        visible = self.visible(queries, keys)
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


@dataclass(frozen=True)
class Window(Mask):
    """A query sees the keys at distances near <= query - key < far."""

    near: int
    far: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = queries - keys
        return (distance >= self.near) & (distance < self.far)


@dataclass(frozen=True)
class Blocks(Mask):
    """Keys are blocks of ``scale`` tokens; a query sees block j, covering positions j*scale .. j*scale+scale-1,
    when the block is finished and its start lies in the window (near <= query - start < far)."""

    scale: int
    near: int
    far: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        start = keys * self.scale
        finished = start + (self.scale - 1) <= queries
        return finished & Window(self.near, self.far).visible(queries, start)
