"""One scale of the top-down model, and how it joins what the coarser scale gives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.pooling import Downsample, Upsample, normalised, right_aligned, unfold_positions
from fairseq_ms.modules.transformer import TransformerStack
from fairseq_ms.ops.linear import ACTIVATIONS, Linear
from fairseq_ms.ops.recompute import recomputed


class Join(nn.Module):
    """Pooled tokens beside the upsampled output of the coarser scale (Multi-scale Transformer LMs, Section 3.2).

    The two are concatenated, projected to half their width and passed through the activation. Both have a layer norm
    behind them: pooled token embeddings are small, and what the coarser scale gives would drown them.

    Args:
        config: width D and activation
        ratio: how many positions of this scale one of the coarser scale stands for
    """

    def __init__(self, config: LayerConfig, ratio: int) -> None:
        super().__init__()
        self.upsample = Upsample(config.dim, ratio)
        self.linear = Linear(2 * config.dim, config.dim)
        self.activation = ACTIVATIONS[config.activation]
        self.recompute = config.recompute

    def forward(self, x_BTD: Tensor, pool: Downsample, norm: nn.LayerNorm, coarse_BCD: Tensor) -> Tensor:
        """(B, T, D), what pools it to C blocks and normalises them, and (B, ceil(C / ratio), D) -> (B, C, D)."""
        # What has no parameters is computed again in backward: x is kept once for all scales, and no pooled tokens.
        pooled_again = pool.conv is None
        if not pooled_again:
            x_BTD = right_aligned(x_BTD, pool)
        ratio, activation = self.upsample.factor, self.activation

        def join(x: Tensor, coarse: Tensor, gain: Tensor, offset: Tensor, *parameters: Tensor) -> Tensor:
            unfold, shift, mix, bias = parameters
            pooled = right_aligned(x, pool) if pooled_again else x
            pooled = F.layer_norm(pooled, norm.normalized_shape, gain, offset, norm.eps)
            fine = unfold_positions(F.linear(coarse, unfold), ratio) + shift
            return activation(F.linear(torch.cat([pooled, fine[:, : pooled.size(1)]], dim=-1), mix, bias))

        parameters = (self.upsample.conv.weight, self.upsample.bias, self.linear.weight, self.linear.bias)
        return recomputed(join, x_BTD, coarse_BCD, norm.weight, norm.bias, *parameters, enabled=self.recompute)

    def combine(self, pooled_BCD: Tensor, upsampled_BCD: Tensor) -> Tensor:
        """The same of pooled tokens and of what ``upsample`` gives for their positions."""
        return self.activation(self.linear(torch.cat([pooled_BCD, upsampled_BCD], dim=-1)))


class TopDownScale(nn.Module):
    """Pooling to blocks, a layer norm, joining with the coarser scale where there is one, and layers over blocks.

    Args:
        factor: tokens a block, k
        ratio: the coarser scale's factor over this one's, None at the coarsest scale
        layers: how many
        config: what the layers have in common
        downsampler: "avg", "max" or "conv"
    """

    def __init__(self, factor: int, ratio: int | None, layers: int, config: LayerConfig, downsampler: str) -> None:
        super().__init__()
        self.factor = factor
        self.pool = Downsample(downsampler, config.dim, factor)
        self.recompute = config.recompute
        self.norm = nn.LayerNorm(config.dim)
        if ratio is not None:
            self.join = Join(config, ratio)
        self.stack = TransformerStack(config, layers)

    def inputs(self, x_BTD: Tensor, coarse_BCD: Tensor | None) -> Tensor:
        """Token embeddings (B, T, D) and the coarser scale's output -> (B, ceil(T / factor), D)."""
        if coarse_BCD is None:
            return normalised(self.blocks, x_BTD, self.pool, self.norm, self.recompute)
        return self.join(x_BTD, self.pool, self.norm, coarse_BCD)

    def blocks(self, x_BTD: Tensor) -> Tensor:
        """The pooled tokens: (B, T, D) -> (B, ceil(T / factor), D)."""
        return right_aligned(x_BTD, self.pool)
