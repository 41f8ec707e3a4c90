"""Cached decoding of the bottom-up model: a scale runs when a block of it is finished."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fairseq_ms.decoding.blocks import UnfinishedBlock
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.kv_cache import Reorderable
from fairseq_ms.modules.multiscale.bottomup import AggregationLayer, BottomUpScale
from fairseq_ms.modules.transformer import TransformerStack


class BottomUpState(DecodingState):
    """What the scales have cached, each at its own pace.

    Args:
        embed, scales, aggregate, stack: the model's, coarse scales from fine to coarse
        batch_size: B
        capacity: tokens to make room for

    Attributes:
        unfinished: by coarse scale, the outputs of the finer scale that wait to be pooled
        coarse: by coarse scale, keys and values of its layers
        aggregation: by coarse scale, keys and values of its blocks
        fine: keys and values of the layers at 1x
    """

    def __init__(
        self,
        embed: TokenEmbedding,
        scales: Sequence[BottomUpScale],
        aggregate: AggregationLayer,
        stack: TransformerStack,
        batch_size: int,
        capacity: int,
    ) -> None:
        self.embed, self.scales, self.aggregate, self.stack = embed, scales, aggregate, stack
        self.length = 0
        like = embed.like()
        self.unfinished = [UnfinishedBlock(batch_size, scale.ratio, like) for scale in scales]
        self.coarse = [scale.stack.new_caches(batch_size, capacity // scale.factor, like) for scale in scales]
        self.aggregation = aggregate.attention.new_caches(batch_size, capacity, like)
        self.fine = stack.new_caches(batch_size, capacity, like)

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = out_BCD = self.embed(tokens_BT)
        blocks = []
        for level, scale in enumerate(self.scales):
            self.unfinished[level].push(out_BCD)
            out_BCD = scale(out_BCD, self.coarse[level])
            self._remember(level, out_BCD)
            blocks.append(out_BCD)
        self.length = tokens_BT.size(1)
        return self.stack(self.aggregate(x_BTD, blocks), self.fine)

    def step(self, tokens_B1: Tensor) -> Tensor:
        x_B1D = newest = self.embed(tokens_B1, start=self.length)
        self.length += 1
        for level, scale in enumerate(self.scales):
            if not self.unfinished[level].push(newest):
                break
            newest = scale(self.unfinished[level].buffer, self.coarse[level])
            self._remember(level, newest)
        return self.stack(self.aggregate.step(x_B1D, self.aggregation), self.fine)

    def _remember(self, level: int, blocks_BCD: Tensor) -> None:
        """Finished blocks join those that the aggregation layer sees."""
        self.aggregation[level].append(*self.aggregate.attention.keys_and_values(level, blocks_BCD))

    def reorder(self, order: Tensor) -> None:
        coarse = [cache for caches in self.coarse for cache in caches]
        parts: list[Reorderable] = [*self.unfinished, *coarse, *self.aggregation, *self.fine]
        for part in parts:
            part.reorder(order)
