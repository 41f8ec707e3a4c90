"""Attention from every token to the finished blocks of coarse scales, split over the heads (Section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.modules.attention import attend, merge_heads, split_heads
from fairseq_ms.modules.kv_cache import KeyValueCache
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.masks import Blocks
from fairseq_ms.ops.norm import norm_linear


class AggregationAttention(nn.Module):
    """Attention whose queries are tokens and whose keys and values are blocks, some heads to a scale.

    Block i of scale k covers positions ik .. (i+1)k-1 and is seen by queries t >= (i+1)k-1. A head that has
    no finished block to see gives exactly zero::

        k = 4      block  0 1 2
        t = 0..2          . . .     zero
        t = 3..6          x . .
        t = 7..10         x x .

    Args:
        dim: model dimension D, a multiple of the number of heads
        heads: heads by scale, as {4: 6, 16: 6}
        dropout: probability of dropping an attention weight
        recompute: keep less for backward
    """

    def __init__(self, dim: int, heads: dict[int, int], dropout: float = 0.0, recompute: bool = True) -> None:
        super().__init__()
        total = sum(heads.values())
        assert dim % total == 0
        self.heads = dict(heads)
        self.head_dim = dim // total
        self.dropout = dropout
        self.recompute = recompute
        self.query = Linear(dim, dim)
        self.coarse = nn.ModuleList(Linear(dim, 2 * count * self.head_dim) for count in heads.values())
        self.out = Linear(dim, dim)

    def new_cache(self, batch_size: int, capacity: int, like: Tensor) -> list[KeyValueCache]:
        """One empty cache of keys and values a scale, with room for the blocks of ``capacity`` tokens."""
        return [
            KeyValueCache(batch_size, count, self.head_dim, capacity // factor, like)
            for factor, count in self.heads.items()
        ]

    def keys_and_values(self, number: int, blocks_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """What the heads of the ``number``-th scale see of its blocks: (B, C, D) -> (B, N, C, H) each."""
        pair = self.coarse[number](blocks_BCD).unflatten(-1, (2, -1, self.head_dim))
        k, v = pair.permute(2, 0, 3, 1, 4).unbind(0)
        return k, v

    def forward(
        self,
        x_BTD: Tensor,
        norm: nn.LayerNorm | None = None,
        mask: Sequence[Tensor] | None = None,
        cache: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D); ``norm`` is applied to x first.

        ``mask`` holds the blocks (B, C, D) of every scale and sets what each token may see of them; a fresh
        cache is filled with them. Without it, every token sees all blocks that the cache holds.
        """
        queries = norm_linear(x_BTD, norm, self.query, self.recompute)
        widths = [count * self.head_dim for count in self.heads.values()]
        outputs = []
        for number, (factor, q_BTD) in enumerate(zip(self.heads, queries.split(widths, dim=-1))):
            q_BNTH = split_heads(q_BTD, self.heads[factor])
            if mask is None:
                assert cache is not None
                y_BNTH = self._see_all(q_BNTH, cache[number])
            else:
                k, v = self.keys_and_values(number, mask[number])
                if cache is not None:
                    cache[number].append(k, v)
                y_BNTH = self._see_finished(q_BNTH, k, v, factor)
            outputs.append(merge_heads(y_BNTH))
        return self.out(torch.cat(outputs, dim=-1))

    def _see_all(self, q_BNTH: Tensor, cache: KeyValueCache) -> Tensor:
        if cache.length == 0:
            return torch.zeros_like(q_BNTH)
        return attend(q_BNTH, cache.keys, cache.values)

    def _see_finished(self, q_BNTH: Tensor, k_BNCH: Tensor, v_BNCH: Tensor, factor: int) -> Tensor:
        length, blocks = q_BNTH.size(2), k_BNCH.size(2)
        if blocks == 0:
            # Zeros that still lead back to the queries: distributed training waits for every gradient.
            return F.pad(q_BNTH[:, :, :0], (0, 0, length, 0))
        # The first block ends at factor - 1: the queries before it are left out, and their place filled with zeros.
        blind = factor - 1
        queries = torch.arange(blind, length, device=q_BNTH.device)[:, None]
        keys = torch.arange(blocks, device=q_BNTH.device)
        y_BNTH = attend(
            q_BNTH[:, :, blind:],
            k_BNCH,
            v_BNCH,
            bias=Blocks(factor, 0, length).bias(queries, keys, q_BNTH.dtype),
            dropout=self.dropout if self.training else 0.0,
            recompute=self.recompute,
        )
        return F.pad(y_BNTH, (0, 0, blind, 0))
