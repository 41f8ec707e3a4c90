"""From tokens to blocks of tokens and back.

A block of scale k stands for k consecutive positions. Which positions a block may be used at is the
business of the model; here a block never mixes with another.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops.linear import Linear, Norm, normalise
from fairseq_ms.core.ops.recompute import recomputed

DOWNSAMPLERS = ("avg", "max", "conv")


class Downsample(nn.Module):
    """Pools every k consecutive positions into one.

    Multi-scale Transformer LMs, Section 3.2; Table 4's ablation of the downsampler.

    Args:
        kind: "avg" mean, "max" maximum, "conv" convolution with kernel and stride k (written as the projection
            of k concatenated inputs that it is)
        dim: model dimension D
        factor: k

    Raises ValueError for another kind.
    """

    def __init__(self, kind: str, dim: int, factor: int) -> None:
        super().__init__()
        if kind not in DOWNSAMPLERS:
            raise ValueError(f"downsampler must be avg, max or conv: got {kind!r}")
        self.kind = kind
        self.factor = factor
        self.conv = Linear(factor * dim, dim) if kind == "conv" and factor > 1 else None

    @property
    def padding(self) -> float:
        """What a position before the first token holds: nothing for a sum, never the greatest for a maximum."""
        return -math.inf if self.kind == "max" else 0.0

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, C * k, D) -> (B, C, D)."""
        if self.factor == 1:
            return x_BTD
        # (B, C * k, D) -> (B, C, k, D)
        blocks = x_BTD.unflatten(1, (x_BTD.size(1) // self.factor, self.factor))
        if self.conv is not None:
            return self.conv(blocks.flatten(2))
        return blocks.mean(2) if self.kind == "avg" else blocks.amax(2)


class Upsample(nn.Module):
    """Unfolds every position into k, by a transposed convolution with kernel and stride k.

    Multi-scale Transformer LMs, Section 4.2.

    Args:
        dim: model dimension D
        factor: k
    """

    def __init__(self, dim: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        # Kernel and stride being equal, outputs do not overlap: one projection to k outputs, one bias for all.
        self.conv = Linear(dim, factor * dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x_BCD: Tensor) -> Tensor:
        """(B, C, D) -> (B, C * k, D)."""
        return unfold_positions(self.conv(x_BCD), self.factor) + self.bias


def unfold_positions(x_BCD: Tensor, factor: int) -> Tensor:
    """Every position's k outputs as positions of their own: (B, C, k * D) -> (B, C * k, D)."""
    return x_BCD.unflatten(-1, (factor, -1)).flatten(1, 2)


def right_aligned(x_BTD: Tensor, pool: Downsample, start: int = 0, before_BKD: Tensor | None = None) -> Tensor:
    """The right-aligned blocks that end at positions start .. start + T - 1: (B, T, D) -> (B, C, D).

    Block i covers positions (i-1)k+1 .. ik and serves outputs ik .. (i+1)k-1, so that every output has a block,
    the first one included (Multi-scale Transformer LMs, Section 3.2, Listing 1)::

        k = 4    position    . . . 0   1 2 3 4   5 6 7 8        (. is padding before the first token)
                 block       [  0  ]   [  1  ]   [  2  ]
                 serves      0 1 2 3   4 5 6 7   8 9 ...

    ``before`` holds at least k - 1 positions before ``start``; without it there is padding, as before the first token.
    """
    factor = pool.factor
    first = first_block(start, factor)
    count = first_block(start + x_BTD.size(1), factor) - first
    if before_BKD is None:
        padded = left_pad(x_BTD, factor - 1, pool.padding)
    else:
        padded = torch.cat([before_BKD[:, before_BKD.size(1) - (factor - 1) :], x_BTD], dim=1)
    skipped = first * factor - start
    return pool(padded[:, skipped : skipped + count * factor])


def first_block(position: int, factor: int) -> int:
    """The first right-aligned block that ends at a position or behind it: block i ends at i * factor."""
    return -(-position // factor)


def normalised(
    blocks: Callable[[Tensor], Tensor], x_BTD: Tensor, pool: Downsample, norm: Norm, recompute: bool
) -> Tensor:
    """``norm(blocks(x))``, where ``blocks`` pools with ``pool``: (B, T, D) -> (B, C, D).

    Both are computed again in backward, unless pooling has parameters: of all that is pooled, x alone is kept.
    """
    if pool.conv is not None:
        return norm(blocks(x_BTD))

    def pooled(x: Tensor, *own_D: Tensor) -> Tensor:
        return normalise(norm, blocks(x), *own_D)

    return recomputed(pooled, x_BTD, *norm.parameters(), enabled=recompute)


def left_pad(x_BTD: Tensor, count: int, value: float = 0.0) -> Tensor:
    """``count`` positions of a constant before the first: (B, T, D) -> (B, count + T, D)."""
    return F.pad(x_BTD, (0, 0, count, 0), value=value) if count else x_BTD
