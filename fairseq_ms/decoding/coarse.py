"""Cached decoding of the coarse-only model: the layers run when a k-gram has ended."""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_ms.decoding.blocks import RecentTokens
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.pooling import Downsample, right_aligned
from fairseq_ms.modules.transformer import TransformerStack


class CoarseState(DecodingState):
    """The layers' keys and values, the tokens of the next block, and the features (B, 1, D) of the newest.

    Args:
        embed, pool, norm, stack: the model's
        batch_size: B
        capacity: tokens to make room for
    """

    def __init__(
        self,
        embed: TokenEmbedding,
        pool: Downsample,
        norm: nn.LayerNorm,
        stack: TransformerStack,
        batch_size: int,
        capacity: int,
    ) -> None:
        self.embed, self.pool, self.norm, self.stack = embed, pool, norm, stack
        self.length = 0
        like = embed.like()
        self.recent = RecentTokens(batch_size, pool.factor, pool.padding, like)
        self.caches = stack.new_caches(batch_size, -(-capacity // pool.factor), like)
        self.newest = like.new_empty(batch_size, 1, like.size(-1))

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        blocks_BCD = self.stack(self.norm(right_aligned(x_BTD, self.pool)), self.caches)
        self.recent.push(x_BTD, 0)
        self.newest = blocks_BCD[:, -1:]
        self.length = tokens_BT.size(1)
        return blocks_BCD.repeat_interleave(self.pool.factor, dim=1)[:, : self.length]

    def step(self, tokens_B1: Tensor) -> Tensor:
        position = self.length
        self.length += 1
        self.recent.push(self.embed(tokens_B1, start=position), position)
        if position % self.pool.factor == 0:
            block_B1D = self.norm(self.pool(self.recent.block(position, self.pool.factor)))
            self.newest = self.stack(block_B1D, self.caches)
        return self.newest

    def reorder(self, order: Tensor) -> None:
        self.recent.reorder(order)
        for cache in self.caches:
            cache.reorder(order)
        self.newest = self.newest.index_select(0, order)
