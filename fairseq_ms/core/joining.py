"""How a scale of the top-down model joins its own pooled tokens with the upsampled output of the coarser scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.ops.linear import ACTIVATIONS, NORM_KINDS, Norm, projection
from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import checkpointed, hookable, saves
from fairseq_ms.core.pooling import Downsample, pooled_again


class Upsample(nn.Module):
    """Unfolds each position into k, by a transposed convolution (Multi-scale Transformer LMs, Section 4.2).

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
        # (B, C, k * D) -> (B, C * k, D)
        return self.conv(x_BCD).unflatten(-1, (self.factor, -1)).flatten(1, 2) + self.bias


@dataclass(frozen=True)
class Coarser:
    """The coarser scale, as a finer one reads it.

    Attributes:
        x_BCD: its output at some blocks
        offset: the first position of the upsampled output that the finer scale reads, a number or a tensor (1,)
    """

    x_BCD: Tensor
    offset: int | Tensor = 0


class Join(nn.Module):
    """Joins pooled tokens with the upsampled output of the coarser scale (Multi-scale Transformer LMs, Section 3.2).

    The two are concatenated, projected from 2 D to D and passed through the activation (swish in place of "swiglu").
    Pooled tokens are normalised first: token embeddings are small, and the coarser scale would drown them.

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
        """Join C blocks, ``norm(blocks(x))``, where ``blocks`` pools with ``pool``: (B, T, D) -> (B, C, D).

        With ``recompute``, x and the coarser scale's output are all that is kept for backward.
        """
        offset = coarse.offset

        def join(x: Tensor, x_BCD: Tensor) -> Tensor:
            normed, fine = norm(blocks(x)), self.upsample(x_BCD)
            if isinstance(offset, Tensor):
                fine = fine.index_select(1, offset)
            else:
                fine = fine[:, offset : offset + normed.size(1)]
            return self.activation(self.linear(torch.cat([normed, fine], dim=-1)))

        own = plain(self.upsample, Upsample) and plain(self.upsample.conv, nn.Linear) and plain(self.linear, nn.Linear)
        # Modules that adapters or hooks are attached to are not called twice.
        again = self.recompute and own and pooled_again(pool) and plain(norm, *NORM_KINDS) and saves() and hookable()
        return checkpointed(join, x_BTD, coarse.x_BCD) if again else join(x_BTD, coarse.x_BCD)
