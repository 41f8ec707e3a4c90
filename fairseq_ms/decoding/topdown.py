"""Cached decoding of the top-down model: every scale at its own pace."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fairseq_ms.decoding.blocks import RecentTokens
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.multiscale.topdown import TopDownScale


class TopDownState(DecodingState):
    """A scale runs when a block of it has just ended; between, the finer ones use what it gave.

    Args:
        embed, scales: the model's, scales from coarse to fine
        batch_size: B
        capacity: tokens to make room for

    Attributes:
        recent: the tokens from which the next blocks will be pooled
        caches: by scale, keys and values of its layers
        upsampled: by scale but the finest, its newest output as the next scale sees it, (B, ratio, D)
    """

    def __init__(self, embed: TokenEmbedding, scales: Sequence[TopDownScale], batch_size: int, capacity: int) -> None:
        self.embed, self.scales = embed, scales
        self.length = 0
        like, coarsest = embed.like(), scales[0]
        self.recent = RecentTokens(batch_size, coarsest.factor, coarsest.pool.padding, like)
        self.caches = [scale.stack.new_caches(batch_size, -(-capacity // scale.factor), like) for scale in scales]
        self.upsampled: list[Tensor] = []

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        out_BCD: Tensor | None = None
        for scale, caches in zip(self.scales, self.caches):
            if out_BCD is not None:
                self.upsampled.append(scale.join.upsample(out_BCD[:, -1:]))
            out_BCD = scale.stack(scale.inputs(x_BTD, out_BCD), caches)
        self.recent.push(x_BTD, 0)
        self.length = tokens_BT.size(1)
        assert out_BCD is not None
        return out_BCD

    def step(self, tokens_B1: Tensor) -> Tensor:
        position = self.length
        self.length += 1
        x_B1D = self.embed(tokens_B1, start=position)
        self.recent.push(x_B1D, position)
        for level, (scale, caches) in enumerate(zip(self.scales, self.caches)):
            if position % scale.factor:
                continue
            x_B1D = scale.norm(scale.pool(self.recent.block(position, scale.factor)))
            if level > 0:
                place = position // scale.factor % scale.join.upsample.factor
                x_B1D = scale.join.combine(x_B1D, self.upsampled[level - 1][:, place : place + 1])
            x_B1D = scale.stack(x_B1D, caches)
            if level + 1 < len(self.scales):
                self.upsampled[level] = self.scales[level + 1].join.upsample(x_B1D)
        return x_B1D

    def reorder(self, order: Tensor) -> None:
        self.recent.reorder(order)
        for cache in (cache for caches in self.caches for cache in caches):
            cache.reorder(order)
        self.upsampled = [blocks.index_select(0, order) for blocks in self.upsampled]
