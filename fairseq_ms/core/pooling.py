"""Pooling of k consecutive positions into one, a block of scale k, in whole texts and piece by piece.

Models decide from which position on a block is seen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.cache import Rows
from fairseq_ms.core.ops.linear import projection


class Downsample(nn.Module):
    """Pools every k consecutive positions into one (Multi-scale Transformer LMs, Section 3.2, Table 4).

    Args:
        kind: "avg" (mean), "max", or "conv" (convolution with kernel and stride k)
        dim: model dimension D
        factor: k
    """

    def __init__(self, kind: str, dim: int, factor: int) -> None:
        super().__init__()
        self.kind = kind
        self.factor = factor
        # Kernel and stride being equal, the convolution is one projection of k positions side by side.
        self.conv = projection(factor * dim, dim) if kind == "conv" and factor > 1 else None

    @property
    def padding(self) -> float:
        """The padding before the first token: neutral in a sum, or in a maximum."""
        return -math.inf if self.kind == "max" else 0.0

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, C * k, D) -> (B, C, D)."""
        if self.factor == 1 or not x_BTD.size(1):
            return x_BTD
        blocks = x_BTD.unflatten(1, (x_BTD.size(1) // self.factor, self.factor))  # (B, C, k, D)
        if self.conv is not None:
            return self.conv(blocks.flatten(2))
        return blocks.mean(2) if self.kind == "avg" else blocks.amax(2)


class UnfinishedBlock(Rows):
    """The positions (B, r, D) of an unfinished block of k, r < k, with the width, type and device of ``like``."""

    def __init__(self, batch_size: int, factor: int, like_BTD: Tensor) -> None:
        super().__init__(like_BTD.new_zeros(batch_size, 0, like_BTD.size(-1)))
        self.factor = factor

    def join(self, x_BTD: Tensor) -> Tensor:
        """The positions of the block and T more, (B, r + T, D); keeps those of the new unfinished block."""
        joined = torch.cat([self.x, x_BTD], dim=1) if self.x.size(1) else x_BTD
        self.x = joined[:, joined.size(1) - joined.size(1) % self.factor :].clone()
        return joined


def right_aligned(x_BTD: Tensor, pool: Downsample, start: int = 0, before_BMD: Tensor | None = None) -> Tensor:
    """Pool the right-aligned blocks that end at positions start .. start + T - 1: (B, T, D) -> (B, C, D).

    Block i covers positions (i-1)k+1 .. ik and serves outputs ik .. (i+1)k-1, so that every output has a block, even
    the first (Multi-scale Transformer LMs, Section 3.2, Listing 1)::

        k = 4    position    . . . 0   1 2 3 4   5 6 7 8        (. is padding before the first token)
                 block       [  0  ]   [  1  ]   [  2  ]
                 serves      0 1 2 3   4 5 6 7   8 9 ...

    ``before`` has at least k - 1 positions before ``start``; without it there is padding, as before the first token.
    """
    factor = pool.factor
    if factor == 1:
        return x_BTD
    first = first_block(start, factor)
    count = first_block(start + x_BTD.size(1), factor) - first
    if before_BMD is None:
        padded = F.pad(x_BTD, (0, 0, factor - 1, 0), value=pool.padding)
    else:
        padded = torch.cat([before_BMD[:, before_BMD.size(1) - (factor - 1) :], x_BTD], dim=1)
    skipped = first * factor - start
    return pool(padded[:, skipped : skipped + count * factor])


def first_block(position: int, factor: int) -> int:
    """The first right-aligned block that ends at a position or after it."""
    return -(-position // factor)
