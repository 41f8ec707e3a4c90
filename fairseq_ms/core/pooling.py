"""From tokens to blocks of tokens and back.

A block of scale k stands for k consecutive positions. At which positions it may be used is up to the model; here a
block never mixes with another. What pools k positions into one is ``scales.Downsample``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.ops.linear import ACTIVATIONS, NORM_KINDS, Norm, normalise, projection, weights_of
from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import autocasted, remade
from fairseq_ms.core.scales import Downsample


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
        self.conv = projection(dim, factor * dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(dim))

    def reset_parameters(self) -> None:
        """Zero the bias; the projection starts as all do."""
        nn.init.zeros_(self.bias)

    def forward(self, x_BCD: Tensor) -> Tensor:
        """(B, C, D) -> (B, C * k, D)."""
        return unfold_positions(self.conv(x_BCD), self.factor) + self.bias


def unfold_positions(x_BCD: Tensor, factor: int) -> Tensor:
    """Every position's k outputs as positions of their own: (B, C, k * D) -> (B, C * k, D)."""
    return x_BCD.unflatten(-1, (factor, -1)).flatten(1, 2)


def right_aligned(x_BTD: Tensor, pool: Downsample, start: int = 0, before_BMD: Tensor | None = None) -> Tensor:
    """The right-aligned blocks that end at positions start .. start + T - 1: (B, T, D) -> (B, C, D).

    Block i covers positions (i-1)k+1 .. ik and serves outputs ik .. (i+1)k-1, so that every output has a block,
    the first one included (Multi-scale Transformer LMs, Section 3.2, Listing 1)::

        k = 4    position    . . . 0   1 2 3 4   5 6 7 8        (. is padding before the first token)
                 block       [  0  ]   [  1  ]   [  2  ]
                 serves      0 1 2 3   4 5 6 7   8 9 ...

    ``before`` holds at least k - 1 positions before ``start``; without it there is padding, as before the first token.
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
    """The first right-aligned block that ends at a position or after it: block i ends at i * factor."""
    return -(-position // factor)


def normalised(
    blocks: Callable[[Tensor], Tensor], x_BTD: Tensor, pool: Downsample, norm: Norm, recompute: bool
) -> Tensor:
    """``norm(blocks(x))``, where ``blocks`` pools with ``pool``: (B, T, D) -> (B, C, D).

    Pooling without parameters is computed again in backward.
    """
    return remade(norm, blocks, x_BTD, enabled=recompute and pooled_again(pool))


def pooled_again(pool: Downsample) -> bool:
    """Whether pooling may be computed a second time in backward: it has neither parameters nor hooks."""
    return pool.conv is None and plain(pool, Downsample)


@dataclass(frozen=True)
class Coarser:
    """What the coarser scale gives.

    Attributes:
        x_BCD: its output at some blocks
        offset: how many finer blocks the first of them serves before the first one that is wanted, perhaps in a
            tensor (1,)
    """

    x_BCD: Tensor
    offset: int | Tensor = 0


class Join(nn.Module):
    """Pooled tokens beside the upsampled output of the coarser scale (Multi-scale Transformer LMs, Section 3.2).

    The two are concatenated, projected to half their width and passed through the activation (swish for "swiglu", which
    is swish times a second projection). Both have a norm after them: pooled token embeddings are small, and what the
    coarser scale gives would drown them.

    Args:
        config: width D and activation
        ratio: how many positions of this scale one of the coarser scale stands for
    """

    def __init__(self, config: LayerConfig, ratio: int) -> None:
        super().__init__()
        self.upsample = Upsample(config.dim, ratio)
        self.linear = projection(2 * config.dim, config.dim)
        self.activation = ACTIVATIONS["swish" if config.activation == "swiglu" else config.activation]
        self.recompute = config.recompute

    def forward(
        self, x_BTD: Tensor, blocks: Callable[[Tensor], Tensor], pool: Downsample, norm: Norm, coarse: Coarser
    ) -> Tensor:
        """(B, T, D), what makes C blocks of it with ``pool``, their norm, and the coarser scale -> (B, C, D)."""
        offset, fine = coarse.offset, self.upsample(coarse.x_BCD)
        again = self.recompute and pooled_again(pool) and plain(norm, *NORM_KINDS)

        def side_by_side(normed: Tensor, fine: Tensor) -> Tensor:
            if isinstance(offset, Tensor):
                fine = fine.index_select(1, offset)
            else:
                fine = fine[:, offset : offset + normed.size(1)]
            return torch.cat([normed, fine], dim=-1)

        def prepared(x: Tensor, fine: Tensor, *own_D: Tensor) -> Tensor:
            normed = remade(lambda pooled: normalise(norm, pooled, *own_D), blocks, x)
            return autocasted(side_by_side(normed, fine))

        if again:
            return self.activation(remade(self.linear, prepared, x_BTD, fine, *weights_of(norm)))
        return self.activation(self.linear(side_by_side(norm(blocks(x_BTD)), fine)))
