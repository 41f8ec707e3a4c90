"""Where a coarse scale meets the next finer one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.modules.feedforward import ACTIVATIONS
from fairseq_ms.modules.linear import Linear
from fairseq_ms.modules.pooling import Upsample, unfold_positions
from fairseq_ms.modules.recompute import recomputed


class Fusion(nn.Module):
    """Pooled tokens joined with the upsampled output of the coarser scale (Section 3.2, Listing 1).

    The two are concatenated, projected to half their width and passed through the activation.

    Args:
        dim: model dimension D
        ratio: how many positions of this scale one of the coarser scale stands for
        activation: a key of ``feedforward.ACTIVATIONS``
        recompute: keep the two inputs alone, and compute all that follows again in backward
    """

    def __init__(self, dim: int, ratio: int, activation: str, recompute: bool) -> None:
        super().__init__()
        self.upsample = Upsample(dim, ratio)
        self.linear = Linear(2 * dim, dim)
        self.activation = ACTIVATIONS[activation]
        self.recompute = recompute

    def forward(self, pooled_BCD: Tensor, coarse_BCD: Tensor) -> Tensor:
        """(B, C, D) and (B, ceil(C / ratio), D) -> (B, C, D)."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self.combine(pooled_BCD, self.upsample(coarse_BCD)[:, : pooled_BCD.size(1)])
        ratio, activation = self.upsample.factor, self.activation

        def fuse(pooled: Tensor, coarse: Tensor, unfold: Tensor, shift: Tensor, mix: Tensor, bias: Tensor) -> Tensor:
            fine = unfold_positions(F.linear(coarse, unfold), ratio) + shift
            return activation(F.linear(torch.cat([pooled, fine[:, : pooled.size(1)]], dim=-1), mix, bias))

        up, linear = self.upsample, self.linear
        return recomputed(fuse, pooled_BCD, coarse_BCD, up.conv.weight, up.bias, linear.weight, linear.bias)

    def combine(self, pooled_BCD: Tensor, upsampled_BCD: Tensor) -> Tensor:
        """What is computed of pooled tokens and what ``upsample`` gives for their positions."""
        return self.activation(self.linear(torch.cat([pooled_BCD, upsampled_BCD], dim=-1)))
