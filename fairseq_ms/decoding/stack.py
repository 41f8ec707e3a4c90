"""Cached decoding of a single stack of layers with full attention."""

from __future__ import annotations

from torch import Tensor

from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.transformer import TransformerStack


class StackState(DecodingState):
    """A key-value cache a layer.

    Args:
        embed, stack: the model's
        batch_size: B
        capacity: positions to make room for
    """

    def __init__(self, embed: TokenEmbedding, stack: TransformerStack, batch_size: int, capacity: int) -> None:
        self.embed, self.stack = embed, stack
        self.caches = stack.new_caches(batch_size, capacity, embed.like())
        self.length = 0

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        return self._advance(tokens_BT)

    def step(self, tokens_B1: Tensor) -> Tensor:
        return self._advance(tokens_B1)

    def _advance(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.stack(self.embed(tokens_BT, start=self.length), self.caches)
        self.length += tokens_BT.size(1)
        return x_BTD

    def reorder(self, order: Tensor) -> None:
        for cache in self.caches:
            cache.reorder(order)

    def truncate(self, length: int) -> None:
        for cache in self.caches:
            cache.truncate(length)
        self.length = length
