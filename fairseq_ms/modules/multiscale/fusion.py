"""Where a coarse scale meets the next finer one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.modules.multiscale.blocks import right_aligned
from fairseq_ms.modules.pooling import Downsample, Upsample, unfold_positions
from fairseq_ms.ops.activation import ACTIVATIONS
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.recompute import recomputed


class Fusion(nn.Module):
    """Pooled tokens joined with the upsampled output of the coarser scale (Section 3.2, Listing 1).

    The two are concatenated, projected to half their width and passed through the activation.

    Args:
        dim: model dimension D
        ratio: how many positions of this scale one of the coarser scale stands for
        activation: a key of ``activation.ACTIVATIONS``
        recompute: keep the tokens and the coarser output alone, and compute all that follows again in backward
    """

    def __init__(self, dim: int, ratio: int, activation: str, recompute: bool) -> None:
        super().__init__()
        self.upsample = Upsample(dim, ratio)
        self.linear = Linear(2 * dim, dim)
        self.activation = ACTIVATIONS[activation]
        self.recompute = recompute

    def forward(self, x_BTD: Tensor, pool: Downsample, coarse_BCD: Tensor) -> Tensor:
        """(B, T, D), what pools it to this scale's C blocks, and (B, ceil(C / ratio), D) -> (B, C, D)."""
        if not (self.recompute and torch.is_grad_enabled()):
            pooled_BCD = right_aligned(x_BTD, pool)
            return self.combine(pooled_BCD, self.upsample(coarse_BCD)[:, : pooled_BCD.size(1)])
        ratio, activation = self.upsample.factor, self.activation
        # What has no parameters is computed again in backward: x is kept once for all scales, and no pooled tokens.
        pooled_again = pool.conv is None
        if not pooled_again:
            x_BTD = right_aligned(x_BTD, pool)

        def fuse(x: Tensor, coarse: Tensor, unfold: Tensor, shift: Tensor, mix: Tensor, bias: Tensor) -> Tensor:
            pooled = right_aligned(x, pool) if pooled_again else x
            fine = unfold_positions(F.linear(coarse, unfold), ratio) + shift
            return activation(F.linear(torch.cat([pooled, fine[:, : pooled.size(1)]], dim=-1), mix, bias))

        up, linear = self.upsample, self.linear
        return recomputed(fuse, x_BTD, coarse_BCD, up.conv.weight, up.bias, linear.weight, linear.bias)

    def combine(self, pooled_BCD: Tensor, upsampled_BCD: Tensor) -> Tensor:
        """What is computed of pooled tokens and what ``upsample`` gives for their positions."""
        return self.activation(self.linear(torch.cat([pooled_BCD, upsampled_BCD], dim=-1)))
