"""The bottom-up model: its coarse scales, and the layer in which every token reads their finished blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.kv_cache import KeyValueCache
from fairseq_ms.modules.pooling import Downsample, normalised
from fairseq_ms.modules.transformer import TransformerStack
from fairseq_ms.ops.attention import attend
from fairseq_ms.ops.linear import Linear, norm_linear
from fairseq_ms.ops.recompute import Dropout


class BottomUpScale(nn.Module):
    """One coarse scale: pooling the finer scale's output, a layer norm, layers over blocks.

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
        self.recompute = config.recompute
        self.pool = Downsample(downsampler, config.dim, ratio)
        self.norm = nn.LayerNorm(config.dim)
        self.stack = TransformerStack(config, layers)

    def forward(self, fine_BCD: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """The finer scale's output (B, C, D) -> (B, C // ratio, D), finished blocks only."""
        finished_BCD = fine_BCD[:, : fine_BCD.size(1) // self.ratio * self.ratio]
        if finished_BCD.size(1) == 0:
            return finished_BCD
        return self.stack(normalised(self.pool, finished_BCD, self.pool, self.norm, self.recompute), caches)


class AggregationAttention(nn.Module):
    """Attention whose queries are tokens and whose keys and values are blocks, some heads to a scale.

    Block i of scale k covers positions ik .. (i+1)k-1 and is seen by queries t >= (i+1)k-1. A head that has
    no finished block to see gives exactly zero::

        k = 4      block  0 1 2
        t = 0..2          . . .     zero
        t = 3..6          x . .
        t = 7..10         x x .

    Args:
        config: sizes and probabilities
        heads: heads by scale, as {4: 6, 16: 6}, whose number divides D
    """

    def __init__(self, config: LayerConfig, heads: dict[int, int]) -> None:
        super().__init__()
        dim, total = config.dim, sum(heads.values())
        assert dim % total == 0
        self.heads = dict(heads)
        self.head_dim = dim // total
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm = nn.LayerNorm(dim)
        self.query = Linear(dim, dim)
        self.coarse = nn.ModuleList(Linear(dim, 2 * count * self.head_dim) for count in heads.values())
        self.out = Linear(dim, dim)

    def forward(self, x_BTD: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """x (B, T, D) and the blocks (B, C, D) of every scale -> (B, T, D)."""
        outputs = []
        for level, (factor, q_BNTH) in enumerate(zip(self.heads, self._queries(x_BTD))):
            k, v = self.keys_and_values(level, blocks[level])
            outputs.append(self._see_finished(q_BNTH, k, v, factor))
        return self.out(torch.cat(outputs, dim=2).flatten(2))

    def step(self, x_B1D: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
        """The same for one more token, which sees all blocks in the caches: (B, 1, D) -> (B, 1, D)."""
        outputs = [
            attend(q_BN1H, cache.keys, cache.values) if cache.length else torch.zeros_like(q_BN1H)
            for q_BN1H, cache in zip(self._queries(x_B1D), caches)
        ]
        return self.out(torch.cat(outputs, dim=1).transpose(1, 2).flatten(2))

    def keys_and_values(self, level: int, blocks_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """What the heads of a scale, counted from the finest, see of its blocks: (B, C, D) -> (B, N, C, H) each."""
        pair = self.coarse[level](blocks_BCD).unflatten(-1, (2, -1, self.head_dim))
        k, v = pair.permute(2, 0, 3, 1, 4).unbind(0)
        return k, v

    def new_caches(self, batch_size: int, capacity: int, like: Tensor) -> list[KeyValueCache]:
        """One empty cache of keys and values a scale, with room for the blocks of ``capacity`` tokens."""
        return [
            KeyValueCache(batch_size, count, self.head_dim, capacity // factor, like)
            for factor, count in self.heads.items()
        ]

    def _queries(self, x_BTD: Tensor) -> list[Tensor]:
        """By scale, (B, N, T, H)."""
        queries = norm_linear(x_BTD, self.norm, self.query, self.recompute)
        # (B, T, N * H) -> (B, N, T, H)
        heads = queries.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return list(heads.split(list(self.heads.values()), dim=1))

    def _see_finished(self, q_BNTH: Tensor, k_BNCH: Tensor, v_BNCH: Tensor, factor: int) -> Tensor:
        """What the heads of a scale see, (B, T, N, H)."""
        length, blocks = q_BNTH.size(2), k_BNCH.size(2)
        if blocks == 0:
            # Zeros that still lead back to the queries: distributed training waits for every gradient.
            return F.pad(q_BNTH[:, :, :0], (0, 0, length, 0)).transpose(1, 2)
        # The first block ends at factor - 1: the queries before it are left out, and their place filled with zeros.
        blind = factor - 1
        queries = torch.arange(blind, length, device=q_BNTH.device)[:, None]
        unfinished = torch.arange(blocks, device=q_BNTH.device) * factor + (factor - 1) > queries
        y_BNTH = attend(
            q_BNTH[:, :, blind:],
            k_BNCH,
            v_BNCH,
            bias=q_BNTH.new_zeros(length - blind, blocks).masked_fill_(unfinished, -torch.inf),
            dropout=self.dropout if self.training else 0.0,
            recompute=self.recompute,
        )
        return F.pad(y_BNTH.transpose(1, 2), (0, 0, 0, 0, blind, 0))


class AggregationLayer(nn.Module):
    """A transformer layer that reads the blocks of all coarse scales (Multi-scale Transformer LMs, Section 3.3).

    Args:
        config: what it has in common with the other layers
        heads: heads by scale
    """

    def __init__(self, config: LayerConfig, heads: dict[int, int]) -> None:
        super().__init__()
        self.attention = AggregationAttention(config, heads)
        self.ffn = config.feed_forward()
        self.drop = Dropout(config.dropout, config.recompute)

    def forward(self, x_BTD: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """x (B, T, D) and the blocks (B, C, D) of every scale -> (B, T, D)."""
        x_BTD = x_BTD + self.drop(self.attention(x_BTD, blocks))
        return x_BTD + self.drop(self.ffn(x_BTD))

    def step(self, x_B1D: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
        """The same for one more token, which sees all blocks in the caches."""
        x_B1D = x_B1D + self.attention.step(x_B1D, caches)
        return x_B1D + self.ffn(x_B1D)
