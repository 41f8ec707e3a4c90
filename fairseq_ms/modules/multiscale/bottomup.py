"""One coarse scale of the bottom-up model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.kv_cache import KeyValueCache
from fairseq_ms.modules.pooling import Downsample
from fairseq_ms.modules.transformer import TransformerStack


class BottomUpScale(nn.Module):
    """One coarse scale: pooling the finer scale's output, layers over blocks.

    Args:
        factor: tokens a block, k
        ratio: its factor over the finer scale's
        layers: how many
        config: what the layers have in common
        downsampler: "avg", "max" or "conv"
    """

    def __init__(self, factor: int, ratio: int, layers: int, config: LayerConfig, downsampler: str) -> None:
        super().__init__()
        self.factor = factor
        self.ratio = ratio
        self.pool = Downsample(downsampler, config.dim, ratio)
        self.stack = TransformerStack(config, layers)

    def forward(self, fine_BCD: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """The finer scale's output (B, C, D) -> (B, C // ratio, D), finished blocks only."""
        blocks_BCD = self.pool(fine_BCD[:, : fine_BCD.size(1) // self.ratio * self.ratio])
        return self.stack(blocks_BCD, caches) if blocks_BCD.size(1) else blocks_BCD
