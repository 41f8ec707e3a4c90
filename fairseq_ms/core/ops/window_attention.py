"""Attention through windows over blocks of tokens, forward and backward, at a cost linear in the number of tokens.

A group of heads looks at one scale k through a window near:far. Its keys are blocks of k tokens; block j is
visible at query t iff it is finished, j k + k - 1 <= t, and its start lies in the window, near <= t - j k < far
(Multi-scale Transformer LMs, Section 3.4, Figure 1e). Queries are processed in blocks of J, each against the constant
number S of keys that any of its queries can see::

    J = 4, scale 1x, window 0:3          keys 0 1 2 3 4 5 6 7
        query block 0 (t = 0..3)         [-2..3] two of them before the first token: hidden
        query block 1 (t = 4..7)             [2 3 4 5 6 7]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_ms.core.ops.attention import ChunkedAttention, attend
from fairseq_ms.core.ops.linear import weight_gradients
from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import DropoutMasks

# Queries that share one slice of keys, if the window is wider than a narrow block, and if it is not.
_QUERY_BLOCK, _NARROW_BLOCK = 64, 32

# Positions whose scores are in memory at a time: as few as a core's cache holds, as many as make a matrix product
# worth its call. Twice or half as many take 5 to 10 % longer on a CPU.
_PIECE = 512


@dataclass(frozen=True)
class HeadGroup:
    """The heads of one scale: ``heads`` of them see blocks of ``factor`` tokens through near:far."""

    factor: int
    near: int
    far: int
    heads: int

    def visible(self, queries: Tensor, blocks: Tensor) -> Tensor:
        """Whether queries (..., J, 1) may attend to blocks (..., 1, S), both integers: finished and in the window."""
        start = blocks * self.factor
        distance = queries - start
        return (distance >= max(self.near, self.factor - 1)) & (distance < self.far)

    def first_visible(self, query: int) -> int:
        """The first block that the window does not leave behind, which may lie before the first token."""
        return (query - self.far) // self.factor + 1

    def last_visible(self, query: int) -> int:
        """The last block that is finished and not too near."""
        return (query - max(self.near, self.factor - 1)) // self.factor


class Layout:
    """How the queries of T tokens are laid out against the keys of one head group, the same for every layer.

    Args:
        group: the heads
        length: number of tokens T
        query_block: J, a multiple of the group's scale
        device: where the mask is built
    """

    def __init__(self, group: HeadGroup, length: int, query_block: int, device: torch.device) -> None:
        self.group = group
        self.length = length
        self.keys = length // group.factor
        first, last = group.first_visible(0), group.last_visible(query_block - 1)
        span = last - first + 1
        # Where the window of a query block is wider than all there is, one slice holds every key.
        self.sliced = span < self.keys
        self.query_block = query_block if self.sliced else length
        self.blocks = -(-length // self.query_block)
        self.span = span if self.sliced else self.keys
        self.step = self.query_block // group.factor if self.sliced else self.span
        self.pad_left = -first if self.sliced else 0
        self.pad_right = max(0, (self.blocks - 1) * self.step + self.span - self.pad_left - self.keys)
        block = torch.arange(self.blocks, device=device)[:, None, None, None]
        queries = block * self.query_block + torch.arange(self.query_block, device=device)[:, None]
        keys = block * self.step - self.pad_left + torch.arange(self.span, device=device)
        # (blocks, 1, J, S)
        visible = group.visible(queries, keys) & (keys >= 0) & (keys < self.keys)
        # A query that sees nothing attends to everything, so that no softmax is empty, and its result is zeroed.
        self.sees_a_key = visible.any(-1, keepdim=True) if self._leaves_a_query_blind() else None
        self.visible = visible | ~self.sees_a_key if self.sees_a_key is not None else visible
        self._bias: Tensor | None = None

    def _leaves_a_query_blind(self) -> bool:
        """Whether some query, padding included, sees no key, without reading the mask.

        The first query has the least before it, and the last is the farthest after the keys.
        """
        last = self.blocks * self.query_block - 1
        return self.group.last_visible(0) < 0 or self.group.first_visible(last) >= self.keys

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The mask as an additive bias (blocks, 1, J, S)."""
        if self._bias is None or self._bias.dtype != dtype:
            zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._bias = zeros.masked_fill(~self.visible, -torch.inf)
        return self._bias


class Layouts:
    """The layouts of all head groups for sequences of one length, the same for every layer."""

    def __init__(self, groups: Sequence[HeadGroup], length: int, device: torch.device) -> None:
        self.groups = list(groups)
        self.layouts = [Layout(group, length, _query_block(group), device) for group in groups]

    def biases(self, dtype: torch.dtype) -> list[Tensor]:
        """The masks of all groups as additive biases (blocks, 1, J, S)."""
        return [layout.bias(dtype) for layout in self.layouts]


def _query_block(group: HeadGroup) -> int:
    """J, a multiple of the scale; a narrow window wastes fewer scores on a short block."""
    least = _QUERY_BLOCK if group.far - group.near > _NARROW_BLOCK else _NARROW_BLOCK
    return group.factor * -(-least // group.factor)


class WindowAttention:
    """All head groups' attention as a function of the projections, keeping nothing else for backward.

    ``forward`` and ``backward`` are for a CPU: a few query blocks of one group in one row of the batch at a time.

    Args:
        layouts: the head groups, laid out
        head_dim: H
        dropout: probability of dropping an attention weight
    """

    def __init__(self, layouts: Layouts, head_dim: int, dropout: float) -> None:
        self.layouts = layouts
        self.head_dim = head_dim
        self.masks = DropoutMasks(dropout) if dropout > 0.0 else None
        widths = [group.heads * head_dim for group in layouts.groups]
        ends = list(itertools.accumulate(widths, initial=0))
        # The columns of every group's queries and results, and how many there are.
        self.columns, self.width = [slice(*ends[index : index + 2]) for index in range(len(widths))], ends[-1]

    def forward(self, fine: Tensor, *coarse: Tensor) -> Tensor:
        """Queries of all groups with keys and values of the first (B, T, D + 2 * N * H), the others' -> (B, T, D)."""
        batch_size, length, _ = fine.shape
        pairs, fine = [fine[..., self.width :], *coarse], self._pad(fine)
        out = fine.new_empty(batch_size, fine.size(1), self.width)
        biases = self.layouts.biases(fine.dtype)
        with torch.autocast(fine.device.type, enabled=False):
            for index, pair in enumerate(pairs):
                for row in range(batch_size):
                    q, result = self._queries(index, fine[row]), self._queries(index, out[row])
                    if pair.size(1) == 0:
                        result.zero_()
                        continue
                    for piece, attention in self._pieces(index, row, biases[index]):
                        attention.forward(q[piece], *self._keys(index, pair[row], piece), out=result[piece])
        return out[:, :length]

    def backward(self, grad: Tensor, fine: Tensor, *coarse: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The result once more, and the gradients of the projections given the gradient of the result."""
        batch_size, length, _ = fine.shape
        pairs, fine, grad = [fine[..., self.width :], *coarse], self._pad(fine), self._pad(grad.to(fine.dtype))
        out, grad_fine, grad_coarse = torch.empty_like(grad), torch.empty_like(fine), []
        biases = self.layouts.biases(fine.dtype)
        with torch.autocast(fine.device.type, enabled=False):
            for index, pair in enumerate(pairs):
                if index == 0:
                    grad_keys = grad_fine[:, :length, self.width :].zero_()
                else:
                    grad_keys = torch.zeros_like(pair)
                    grad_coarse.append(grad_keys)
                for row in range(batch_size):
                    q, grad_q, result, grad_result = (
                        self._queries(index, part[row]) for part in (fine, grad_fine, out, grad)
                    )
                    if pair.size(1) == 0:
                        result.zero_()
                        grad_q.zero_()
                        continue
                    for piece, attention in self._pieces(index, row, biases[index]):
                        k, v = self._keys(index, pair[row], piece)
                        grad_q[piece], *grads = attention.backward(
                            grad_result[piece], q[piece], k, v, out=result[piece]
                        )
                        _add_slices(self.layouts.layouts[index], grad_keys[row], piece.start, grads)
        return out[:, :length], [grad_fine[:, :length], *grad_coarse]

    def _pad(self, x_BTD: Tensor) -> Tensor:
        """As many positions as the query blocks of every group need."""
        padding = max(layout.blocks * layout.query_block for layout in self.layouts.layouts) - x_BTD.size(1)
        return F.pad(x_BTD, (0, 0, 0, padding)) if padding else x_BTD

    def _queries(self, index: int, x_TD: Tensor) -> Tensor:
        """A view (blocks, N, J, H) of a group's columns of one row (T, ...)."""
        layout = self.layouts.layouts[index]
        own = x_TD[: layout.blocks * layout.query_block, self.columns[index]]
        return own.view(layout.blocks, layout.query_block, -1, self.head_dim).transpose(1, 2)

    def _keys(self, index: int, pair_CD: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        """Views (blocks, N, S, H) of the keys and the values of some blocks in overlapping slices of one row."""
        slices = _slices(self.layouts.layouts[index], pair_CD, piece.start, piece.stop - piece.start)
        k, v = slices.unflatten(1, (2, -1, self.head_dim)).transpose(-1, -2).unbind(1)
        return k, v

    def _pieces(self, index: int, row: int, bias: Tensor) -> Iterator[tuple[slice, ChunkedAttention]]:
        """A group's query blocks in one row, some at a time, with dropout masks that are the same ones in backward."""
        layout = self.layouts.layouts[index]
        step = max(1, _PIECE // layout.query_block)
        for start in range(0, layout.blocks, step):
            piece = slice(start, min(start + step, layout.blocks))
            sees_a_key = None if layout.sees_a_key is None else layout.sees_a_key[piece]
            yield piece, ChunkedAttention(bias[piece], False, self.masks, (index, row, start), sees_a_key)

    def by_autograd(self, fine: Tensor, *coarse: Tensor) -> Tensor:
        """The same of torch's own attention, which keeps more and runs on every device."""
        heads = []
        widths = [columns.stop - columns.start for columns in self.columns]
        *queries, pair = fine.split([*widths, fine.size(-1) - self.width], dim=-1)
        for layout, q_BTD, pair_BCD in zip(self.layouts.layouts, queries, [pair, *coarse]):
            group = layout.group
            if pair_BCD.size(1) == 0:
                # Zeros that still lead back to all parameters: distributed training waits for every gradient.
                heads.append(q_BTD * 0.0 + pair_BCD.sum())
                continue
            k, v = pair_BCD.unflatten(-1, (2, group.heads, self.head_dim)).unbind(2)
            y = attend(
                _fold_queries(layout, q_BTD.unflatten(-1, (group.heads, self.head_dim))),
                _slice_keys(layout, k),
                _slice_keys(layout, v),
                bias=layout.bias(q_BTD.dtype),
                dropout=self.masks.p if self.masks is not None else 0.0,
                recompute=False,
            )
            if layout.sees_a_key is not None:
                y = y * layout.sees_a_key.to(y.dtype)
            heads.append(_unfold_queries(layout, y, q_BTD.size(0)))
        return torch.cat(heads, dim=-1)


class _WindowAttentionLinear(torch.autograd.Function):
    """``WindowAttention`` and the projection after it, keeping the projections in front of it alone."""

    @staticmethod
    def forward(ctx, attention: WindowAttention, weight_OI: Tensor, bias_O: Tensor | None, *inputs: Tensor):
        ctx.attention, ctx.has_bias = attention, bias_O is not None
        ctx.save_for_backward(weight_OI, *inputs)
        return F.linear(attention.forward(*inputs), weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weight_OI, *inputs = ctx.saved_tensors
        attended, grad_inputs = ctx.attention.backward(grad @ weight_OI.to(grad.dtype), *inputs)
        return None, *weight_gradients(grad, attended, ctx.has_bias), *grad_inputs


def window_attention_linear(
    fine: Tensor,
    coarse: Sequence[Tensor],
    layouts: Layouts,
    head_dim: int,
    out: nn.Linear,
    dropout: float,
    recompute: bool,
) -> Tensor:
    """Attention of all head groups through their windows, and the projection after it: (B, T, D) -> (B, T, D).

    Its naive twin attends under dense masks (``tests/core/test_retina.py``). On a CPU, with ``recompute``, only
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
    attention = WindowAttention(layouts, head_dim, dropout)
    on_cpu = recompute and fine.device.type == "cpu"
    if on_cpu and not torch.is_grad_enabled():
        return out(attention.forward(fine, *coarse))
    if not (on_cpu and plain(out)):
        return out(attention.by_autograd(fine, *coarse))
    return _WindowAttentionLinear.apply(attention, out.weight, out.bias, fine, *coarse)


def _slices(layout: Layout, k_CD: Tensor, first: int, count: int) -> Tensor:
    """The keys that ``count`` blocks from ``first`` on can see, (count, D, S), zero before the first token."""
    before, inside, behind = _rows(layout, k_CD.size(0), first, count)
    padded = F.pad(k_CD[inside], (0, 0, before, behind)) if before or behind else k_CD[inside]
    return padded.unfold(0, layout.span, layout.step)


def _add_slices(layout: Layout, sums_CD: Tensor, first: int, grads: Sequence[Tensor]) -> None:
    """The transpose of ``slices``: a key's gradient is the sum over the blocks that can see it.

    Adds to ``sums`` the gradients of keys and values, (count, N, S, H) each, of the blocks from ``first`` on.
    """
    count, heads, _, head_dim = grads[0].shape
    # With room for whole steps after the last slice.
    own = sums_CD.new_zeros((count - 1 - -layout.span // layout.step) * layout.step, sums_CD.size(1))
    for offset in range(0, layout.span, layout.step):
        into = own[offset : offset + count * layout.step].view(count, layout.step, len(grads), heads, head_dim)
        for index, grad in enumerate(grads):
            part = grad[:, :, offset : offset + layout.step].transpose(1, 2)
            into[:, : part.size(1), index] += part
    before, inside, _ = _rows(layout, sums_CD.size(0), first, count)
    sums_CD[inside] += own[before : before + inside.stop - inside.start]


def _rows(layout: Layout, keys: int, first: int, count: int) -> tuple[int, slice, int]:
    """The rows of keys in the slices of some blocks: how many before the first key, which, how many after."""
    start = first * layout.step - layout.pad_left
    total = (count - 1) * layout.step + layout.span
    inside = slice(min(max(start, 0), keys), min(max(start + total, 0), keys))
    before = min(max(-start, 0), total)
    return before, inside, total - before - (inside.stop - inside.start)


def _fold_queries(layout: Layout, q_BTNH: Tensor) -> Tensor:
    """(B, T, N, H) -> (blocks, B * N, J, H)."""
    padding = layout.blocks * layout.query_block - layout.length
    q = F.pad(q_BTNH, (0, 0, 0, 0, 0, padding)) if padding else q_BTNH
    return q.unflatten(1, (layout.blocks, layout.query_block)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _slice_keys(layout: Layout, k_BCNH: Tensor) -> Tensor:
    """(B, C, N, H) -> (blocks, B * N, S, H), every block the keys it can see."""
    k = F.pad(k_BCNH, (0, 0, 0, 0, layout.pad_left, layout.pad_right)) if layout.sliced else k_BCNH
    # (B, C', N, H) -> (B, blocks, N, H, S)
    slices = k.unfold(1, layout.span, layout.step)
    # The last keys may be too near for every query: they are in no slice.
    return slices[:, : layout.blocks].permute(1, 0, 2, 4, 3).flatten(1, 2)


def _unfold_queries(layout: Layout, y: Tensor, batch_size: int) -> Tensor:
    """(blocks, B * N, J, H) -> (B, T, N * H)."""
    y = y.unflatten(1, (batch_size, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2)
    return y[:, : layout.length]
