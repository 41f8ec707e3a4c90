"""How windows over blocks of tokens are laid out, so that attention through them costs as much as they are wide.

A group of heads looks at one scale k through a window near:far. Its keys are blocks of k tokens; block j is
visible at query t iff it is finished, j k + k - 1 <= t, and its start lies in the window, near <= t - j k < far
(Multi-scale Transformer LMs, Section 3.4, Figure 1e). Queries are processed in blocks of Q, each against the constant
number S of keys that any of its queries can see::

    Q = 4, scale 1x, window 0:3          keys 0 1 2 3 4 5 6 7
        query block 0 (t = 0..3)         [-2..3] two of them before the first token: hidden
        query block 1 (t = 4..7)             [2 3 4 5 6 7]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Queries that share one slice of keys, if the window is wider than a narrow block, and if it is not.
_QUERY_BLOCK, _NARROW_BLOCK = 64, 32


@dataclass(frozen=True)
class HeadGroup:
    """The heads of one scale: ``heads`` of them see blocks of ``factor`` tokens through near:far."""

    factor: int
    near: int
    far: int
    heads: int

    def visible(self, queries: Tensor, blocks: Tensor) -> Tensor:
        """Whether queries (..., Q, 1) may attend to blocks (..., 1, S), both integers: finished and in the window."""
        start = blocks * self.factor
        distance = queries - start
        return (distance >= max(self.near, self.factor - 1)) & (distance < self.far)

    def first_visible(self, query: int) -> int:
        """The first block that the window does not leave behind, which may lie before the first token."""
        return (query - self.far) // self.factor + 1

    def last_visible(self, query: int) -> int:
        """The last block that is finished and not too near."""
        return (query - max(self.near, self.factor - 1)) // self.factor


class Layout:
    """How the queries of T tokens are laid out against the keys of one head group, the same for every layer.

    Args:
        group: the heads
        length: number of tokens T
        query_block: Q, a multiple of the group's scale
        device: where the mask is built
    """

    def __init__(self, group: HeadGroup, length: int, query_block: int, device: torch.device) -> None:
        self.group = group
        self.length = length
        self.keys = length // group.factor
        first, last = group.first_visible(0), group.last_visible(query_block - 1)
        span = last - first + 1
        # Where the window of a query block is wider than all there is, one slice holds every key.
        self.sliced = span < self.keys
        self.query_block = query_block if self.sliced else length
        self.blocks = -(-length // self.query_block)
        self.span = span if self.sliced else self.keys
        self.step = self.query_block // group.factor if self.sliced else self.span
        self.pad_left = -first if self.sliced else 0
        self.pad_right = max(0, (self.blocks - 1) * self.step + self.span - self.pad_left - self.keys)
        block = torch.arange(self.blocks, device=device)[:, None, None, None]
        queries = block * self.query_block + torch.arange(self.query_block, device=device)[:, None]
        keys = block * self.step - self.pad_left + torch.arange(self.span, device=device)
        # (blocks, 1, Q, S)
        visible = group.visible(queries, keys) & (keys >= 0) & (keys < self.keys)
        # A query that sees nothing attends to anything, so that no softmax is empty, and is zeroed afterwards.
        self.sees_a_key = visible.any(-1, keepdim=True) if self._leaves_a_query_blind() else None
        self.visible = visible | ~self.sees_a_key if self.sees_a_key is not None else visible
        self._bias: Tensor | None = None

    def _leaves_a_query_blind(self) -> bool:
        """Whether some query, of the padding behind the tokens too, sees no key: told without a look at the mask.

        The first query has the least before it, and the last is the farthest behind the keys.
        """
        last = self.blocks * self.query_block - 1
        return self.group.last_visible(0) < 0 or self.group.first_visible(last) >= self.keys

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The mask as an additive bias (blocks, 1, Q, S)."""
        if self._bias is None or self._bias.dtype != dtype:
            zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._bias = zeros.masked_fill_(~self.visible, -torch.inf)
        return self._bias


class Layouts:
    """The layouts of all head groups for sequences of one length, the same for every layer."""

    def __init__(self, groups: Sequence[HeadGroup], length: int, device: torch.device) -> None:
        self.groups = list(groups)
        self.layouts = [Layout(group, length, _query_block(group), device) for group in groups]

    def biases(self, dtype: torch.dtype) -> list[Tensor]:
        """The masks of all groups as additive biases (blocks, 1, Q, S)."""
        return [layout.bias(dtype) for layout in self.layouts]


def _query_block(group: HeadGroup) -> int:
    """Q, a multiple of the scale; a narrow window wastes fewer scores on a short block."""
    least = _QUERY_BLOCK if group.far - group.near > _NARROW_BLOCK else _NARROW_BLOCK
    return group.factor * -(-least // group.factor)
