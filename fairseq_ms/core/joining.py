"""How a scale of the top-down model joins its own pooled tokens with the upsampled output of the coarser scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.ops.linear import ACTIVATIONS, projection


class Upsample(nn.Module):
    """Unfolds each position into k, by a transposed convolution (Multi-scale Transformer LMs, Section 4.2)."""

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
        return self.conv(x_BCD).unflatten(-1, (self.factor, -1)).flatten(1, 2) + self.bias


class Coarser(NamedTuple):
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

    def forward(self, x_BCD: Tensor, coarser_BCD: Tensor, offset: int | Tensor = 0) -> Tensor:
        """Normalised pooled tokens (B, C, D), and the contents of a ``Coarser`` -> (B, C, D)."""
        fine = self.upsample(coarser_BCD)
        if isinstance(offset, Tensor):
            fine = fine.index_select(1, offset)
        else:
            fine = fine[:, offset : offset + x_BCD.size(1)]
        return self.activation(self.linear(torch.cat([x_BCD, fine], dim=-1)))
