"""How a finer scale of the top-down model reads the coarser one: upsampled, beside its own pooled tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.ops.linear import ACTIVATIONS, NORM_KINDS, Norm, normalise, projection, weights_of
from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import autocasted, checkpointed, hookable, remade, saves
from fairseq_ms.core.pooling import Downsample, pooled_again


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
        offset = coarse.offset
        own = plain(self.upsample, Upsample) and plain(self.upsample.conv, nn.Linear) and plain(self.linear, nn.Linear)
        again = self.recompute and pooled_again(pool) and plain(norm, *NORM_KINDS)
        whole = again and own and saves() and hookable()

        def side_by_side(normed: Tensor, fine: Tensor) -> Tensor:
            if isinstance(offset, Tensor):
                fine = fine.index_select(1, offset)
            else:
                fine = fine[:, offset : offset + normed.size(1)]
            return torch.cat([normed, fine], dim=-1)

        def prepared(x: Tensor, fine: Tensor, *own_D: Tensor) -> Tensor:
            normed = remade(lambda pooled: normalise(norm, pooled, *own_D), blocks, x)
            return autocasted(side_by_side(normed, fine))

        def join(x: Tensor, x_BCD: Tensor) -> Tensor:
            fine = self.upsample(x_BCD)
            if again and not whole:
                return self.activation(remade(self.linear, prepared, x, fine, *weights_of(norm)))
            return self.activation(self.linear(side_by_side(norm(blocks(x)), fine)))

        # What adapters or hooks are attached to is not called twice.
        return checkpointed(join, x_BTD, coarse.x_BCD) if whole else join(x_BTD, coarse.x_BCD)
