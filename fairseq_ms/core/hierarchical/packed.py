"""A stack of layers over sequences of unequal lengths that lie one behind the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_ms.core.layers import SelfAttention, TransformerLayer, TransformerStack
from fairseq_ms.core.ops.attention import attend, merge_heads, split_qkv
from fairseq_ms.core.ops.linear import norm_linear
from fairseq_ms.core.ops.recompute import checkpointed

Rectangles = Sequence[tuple[int, int]]
"""How many sequences there are of each length, in the order in which they lie."""


@dataclass(frozen=True)
class SequencePacking:
    """One whole sequence behind the other, the longest first, so that those of equal length form a rectangle.

    Attributes:
        start_M: row of the first token of each sequence.
        rectangles: (number of sequences, their common length) for each length, in the order in which they lie.
    """

    start_M: Tensor
    rectangles: list[tuple[int, int]]

    @classmethod
    def of(cls, lengths_M: Tensor) -> SequencePacking:
        """Pack M sequences of the given lengths, each at least 1."""
        order_M = torch.argsort(lengths_M, descending=True, stable=True)
        sorted_M = lengths_M[order_M]
        start_M = torch.empty_like(lengths_M).index_copy_(0, order_M, sorted_M.cumsum(0) - sorted_M)
        # The shapes of all that follows depend on the data, so the lengths have to be known on the host: one transfer.
        counts = torch.bincount(lengths_M).tolist()
        return cls(start_M, [(count, length) for length, count in reversed([*enumerate(counts)]) if count])


def packed_stack(stack: TransformerStack, x_PD: Tensor, rectangles: Rectangles) -> Tensor:
    """What ``stack`` gives for each sequence by itself: (P, D) -> (P, D)."""
    for layer in stack.layers:
        if stack.checkpoint:
            x_PD = checkpointed(packed_layer, layer, x_PD, rectangles)
        else:
            x_PD = packed_layer(layer, x_PD, rectangles)
    return stack.norm(x_PD)


def packed_layer(layer: TransformerLayer, x_PD: Tensor, rectangles: Rectangles) -> Tensor:
    """One layer of ``packed_stack``."""
    x_PD = x_PD + layer.drop(_packed_attention(layer.attention, x_PD, rectangles))
    return x_PD + layer.drop(layer.ffn(x_PD))


def _packed_attention(attention: SelfAttention, x_PD: Tensor, rectangles: Rectangles) -> Tensor:
    qkv = norm_linear(x_PD, attention.norm, attention.qkv, attention.recompute)
    dropout = attention.dropout if attention.training else 0.0
    outputs = []
    for part, (count, length) in zip(qkv.split([count * length for count, length in rectangles]), rectangles):
        q, k, v = split_qkv(part.view(count, length, -1), attention.heads)
        y_BNTH = attend(q, k, v, causal=True, dropout=dropout, recompute=attention.recompute)
        outputs.append(merge_heads(y_BNTH).flatten(0, 1))
    return attention.out(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
