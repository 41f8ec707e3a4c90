"""Attention through windows over blocks of tokens, forward and backward, at a cost linear in the number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.ops.attention import ChunkedAttention, attend
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.recompute import draw_seed, mixed_seed, pointwise_linear
from fairseq_ms.ops.window_layout import HeadGroup, Layout, Layouts

# Positions whose scores are in memory at a time: as few as a core's cache holds, as many as make a matrix product
# worth its call. Twice or half as many take 5 to 10 % longer on a CPU.
_PIECE = 512


class WindowAttention:
    """All head groups' attention as a function of the projections, keeping nothing else for backward.

    An ``ExplicitBackward``, a few query blocks of one group in one row of the batch at a time.

    Args:
        groups, layouts: the head groups and their layouts
        head_dim: H
        dropout: probability of dropping an attention weight
    """

    def __init__(self, groups: Sequence[HeadGroup], layouts: Sequence[Layout], head_dim: int, dropout: float) -> None:
        self.groups = groups
        self.layouts = layouts
        self.head_dim = head_dim
        self.dropout = dropout
        self.seed = draw_seed() if dropout > 0.0 else 0

    def __call__(self, fine: Tensor, *coarse: Tensor) -> Tensor:
        """Queries of all groups with keys and values of the first (B, T, D + 2 * N * H), the others' -> (B, T, D)."""
        batch_size, length, _ = fine.shape
        fine = self._pad(fine)
        out = fine.new_empty(batch_size, fine.size(1), self._columns()[-1].stop)
        with torch.autocast(fine.device.type, enabled=False):
            for index, pair in enumerate(self._pairs(fine, coarse, length)):
                for row in range(batch_size):
                    q, result = self._queries(index, fine[row]), self._queries(index, out[row])
                    if pair.size(1) == 0:
                        result.zero_()
                        continue
                    for piece, attention in self._pieces(index, row, q):
                        attention.forward(q[piece], *self._keys(index, pair[row], piece), out=result[piece])
        return out[:, :length]

    def backward(self, grad: Tensor, fine: Tensor, *coarse: Tensor) -> tuple[Tensor, list[Tensor]]:
        batch_size, length, _ = fine.shape
        fine, grad = self._pad(fine), self._pad(grad.to(fine.dtype))
        out, grad_fine, grad_coarse = torch.empty_like(grad), torch.empty_like(fine), []
        with torch.autocast(fine.device.type, enabled=False):
            for index, pair in enumerate(self._pairs(fine, coarse, length)):
                if index == 0:
                    grad_keys = grad_fine[:, :length, out.size(-1) :].zero_()
                else:
                    grad_keys = torch.zeros_like(coarse[index - 1])
                    grad_coarse.append(grad_keys)
                for row in range(batch_size):
                    q, grad_q, result, grad_result = (
                        self._queries(index, part[row]) for part in (fine, grad_fine, out, grad)
                    )
                    if pair.size(1) == 0:
                        result.zero_()
                        grad_q.zero_()
                        continue
                    for piece, attention in self._pieces(index, row, q):
                        k, v = self._keys(index, pair[row], piece)
                        grad_q[piece], *grads = attention.backward(
                            grad_result[piece], q[piece], k, v, out=result[piece]
                        )
                        self.layouts[index].add_slices(grad_keys[row], piece.start, grads)
        return out[:, :length], [grad_fine[:, :length], *grad_coarse]

    def _pad(self, x_BTD: Tensor) -> Tensor:
        """As many positions as the query blocks of every group need."""
        padding = max(layout.blocks * layout.query_block for layout in self.layouts) - x_BTD.size(1)
        return F.pad(x_BTD, (0, 0, 0, padding)) if padding else x_BTD

    def _columns(self) -> list[slice]:
        """The columns of every group's queries and results."""
        ends = list(itertools.accumulate((group.heads * self.head_dim for group in self.groups), initial=0))
        return [slice(*ends[index : index + 2]) for index in range(len(self.groups))]

    def _pairs(self, fine: Tensor, coarse: Sequence[Tensor], length: int) -> list[Tensor]:
        """Keys and values of every group, (B, C, 2 * N * H)."""
        return [fine[:, :length, self._columns()[-1].stop :], *coarse]

    def _queries(self, index: int, x_TD: Tensor) -> Tensor:
        """A view (blocks, N, Q, H) of a group's columns of one row (T, ...)."""
        layout = self.layouts[index]
        own = x_TD[: layout.blocks * layout.query_block, self._columns()[index]]
        return own.view(layout.blocks, layout.query_block, -1, self.head_dim).transpose(1, 2)

    def _keys(self, index: int, pair_CD: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        """Views (blocks, N, S, H) of the keys and the values of some blocks in overlapping slices of one row."""
        slices = self.layouts[index].slices(pair_CD, piece.start, piece.stop - piece.start)
        k, v = slices.unflatten(1, (2, -1, self.head_dim)).transpose(-1, -2).unbind(1)
        return k, v

    def _pieces(self, index: int, row: int, q: Tensor) -> Iterator[tuple[slice, ChunkedAttention]]:
        """Some of the blocks of q (blocks, N, Q, H) at a time, each with seeds that are the same ones in backward."""
        layout = self.layouts[index]
        bias = layout.bias(q.dtype)
        step = max(1, _PIECE // layout.query_block)
        for start in range(0, layout.blocks, step):
            piece = slice(start, min(start + step, layout.blocks))
            seed = mixed_seed(self.seed, index, row, start) if self.dropout > 0.0 else 0
            sees_a_key = None if layout.sees_a_key is None else layout.sees_a_key[piece]
            yield piece, ChunkedAttention(bias[piece], False, self.dropout, seed, sees_a_key)

    def by_autograd(self, fine: Tensor, *coarse: Tensor) -> Tensor:
        """The same of torch's own attention, which keeps more and runs on every device."""
        heads = []
        for group, layout, q_BTD, pair_BCD in zip(self.groups, self.layouts, *self._split(fine, coarse)):
            if pair_BCD.size(1) == 0:
                # Zeros that still lead back to all parameters: distributed training waits for every gradient.
                heads.append(q_BTD * 0.0 + pair_BCD.sum())
                continue
            k, v = pair_BCD.unflatten(-1, (2, group.heads, self.head_dim)).unbind(2)
            y = attend(
                layout.fold_queries(q_BTD.unflatten(-1, (group.heads, self.head_dim))),
                layout.slice_keys(k),
                layout.slice_keys(v),
                bias=layout.bias(q_BTD.dtype),
                dropout=self.dropout,
                recompute=False,
            )
            if layout.sees_a_key is not None:
                y = y * layout.sees_a_key.to(y.dtype)
            heads.append(layout.unfold_queries(y, q_BTD.size(0)))
        return torch.cat(heads, dim=-1)

    def _split(self, fine: Tensor, coarse: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The queries of every group and its keys and values."""
        widths = [group.heads * self.head_dim for group in self.groups]
        *queries, pair = fine.split([*widths, 2 * widths[0]], dim=-1)
        return queries, [pair, *coarse]


def window_attention_linear(
    fine: Tensor,
    coarse: Sequence[Tensor],
    layouts: Layouts,
    head_dim: int,
    out: Linear,
    dropout: float,
    recompute: bool,
) -> Tensor:
    """Attention of all head groups through their windows, and the projection behind it: (B, T, D) -> (B, T, D).

    Its naive twin attends under dense masks (``tests/modules/test_retina.py``). On a CPU, with ``recompute``, only
    ``fine`` and ``coarse`` are kept for backward.

    Args:
        fine: queries of all groups beside keys and values of the first, (B, T, D + 2 * N * H)
        coarse: keys beside values of the other groups, (B, T // k, 2 * N * H) each
        layouts: the groups, laid out for T tokens
        head_dim: H
        out: the projection
        dropout: probability of dropping an attention weight
        recompute: keep less for backward
    """
    attention = WindowAttention(layouts.groups, layouts.layouts, head_dim, dropout)
    if not (recompute and fine.device.type == "cpu"):
        return out(attention.by_autograd(fine, *coarse))
    if not torch.is_grad_enabled():
        return out(attention(fine, *coarse))
    return pointwise_linear(attention, out.weight, out.bias, fine, *coarse)
