"""Attention through windows over blocks of tokens, at a cost linear in the number of tokens.

A group of heads looks at one scale k through a window near:far. Its keys are blocks of k tokens; block j is
visible at query t iff it is finished, j k + k - 1 <= t, and its start lies in the window, near <= t - j k < far
(Section 3.4, Figure 1e). Queries are processed in blocks of Q, each against the constant number S of keys that
any of its queries can see::

    Q = 4, scale 1x, window 0:3          keys 0 1 2 3 4 5 6 7
        query block 0 (t = 0..3)         [-2..3] two of them before the first token: hidden
        query block 1 (t = 4..7)             [2 3 4 5 6 7]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.modules.attention import ChunkedAttention, FusedAttention, attend, merge_heads, split_heads
from fairseq_ms.modules.linear import Linear
from fairseq_ms.modules.masks import Blocks
from fairseq_ms.modules.norm import norm_linear
from fairseq_ms.modules.pooling import Downsample
from fairseq_ms.modules.recompute import draw_seed, pointwise_linear
from fairseq_ms.modules.state import is_identity

# Queries that share one slice of keys, if the window is wider than a narrow block, and if it is not.
_QUERY_BLOCK, _NARROW_BLOCK = 64, 32


@dataclass(frozen=True)
class HeadGroup:
    """The heads of one scale: ``heads`` of them see blocks of ``factor`` tokens through near:far."""

    factor: int
    near: int
    far: int
    heads: int

    @property
    def mask(self) -> Blocks:
        return Blocks(self.factor, self.near, self.far)

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
        query_block: Q, a multiple of the group's scale
        device: where the mask is built
    """

    def __init__(self, group: HeadGroup, length: int, query_block: int, device: torch.device) -> None:
        self.length = length
        self.keys = length // group.factor
        first, last = group.first_visible(0), group.last_visible(query_block - 1)
        span = last - first + 1
        # Where the window of a query block is wider than all there is, one slice holds every key.
        self.sliced = span < self.keys
        self.query_block = query_block if self.sliced else length
        self.blocks = -(-length // self.query_block)
        self.span = span if self.sliced else self.keys
        self.step = self.query_block // group.factor
        self.pad_left = -first if self.sliced else 0
        self.pad_right = max(0, (self.blocks - 1) * self.step + self.span - self.pad_left - self.keys)
        number = torch.arange(self.blocks, device=device)[:, None, None, None]
        queries = number * self.query_block + torch.arange(self.query_block, device=device)[:, None]
        keys = number * self.step - self.pad_left + torch.arange(self.span, device=device)
        # (blocks, 1, Q, S)
        visible = group.mask.visible(queries, keys) & (keys >= 0) & (keys < self.keys)
        sighted = visible.any(-1, keepdim=True)
        # A query that sees nothing attends to anything, so that no softmax is empty, and is zeroed afterwards.
        self.sighted = None if bool(sighted.all()) else sighted
        self.visible = visible | ~sighted
        self._bias: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The mask as an additive bias (blocks, 1, Q, S)."""
        if self._bias is None or self._bias.dtype != dtype:
            zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._bias = zeros.masked_fill_(~self.visible, -torch.inf)
        return self._bias

    def fold_queries(self, q_BTNH: Tensor) -> Tensor:
        """(B, T, N, H) -> (blocks, B * N, Q, H)."""
        padding = self.blocks * self.query_block - self.length
        q = F.pad(q_BTNH, (0, 0, 0, 0, 0, padding)) if padding else q_BTNH
        return q.unflatten(1, (self.blocks, self.query_block)).permute(1, 0, 3, 2, 4).flatten(1, 2)

    def slice_keys(self, k_BCNH: Tensor) -> Tensor:
        """(B, C, N, H) -> (blocks, B * N, S, H), every block the keys it can see."""
        k = F.pad(k_BCNH, (0, 0, 0, 0, self.pad_left, self.pad_right)) if self.sliced else k_BCNH
        # (B, C', N, H) -> (B, blocks, N, H, S)
        slices = k.unfold(1, self.span, self.step if self.sliced else self.span)
        # The last keys may be too near for every query: they are in no slice.
        return slices[:, : self.blocks].permute(1, 0, 2, 4, 3).flatten(1, 2)

    def pad_keys(self, k_BCD: Tensor) -> Tensor:
        """(B, C, D) -> (B, C', D), long enough for every slice."""
        return F.pad(k_BCD, (0, 0, self.pad_left, self.pad_right)) if self.sliced else k_BCD

    def slices(self, k_CD: Tensor) -> Tensor:
        """Padded keys (C', D) -> a view (blocks, D, S): every block the keys it can see."""
        return k_CD.unfold(0, self.span, self.step if self.sliced else self.span)[: self.blocks]

    def add_slices(self, grads: Tensor) -> Tensor:
        """The transpose of ``slices``: a key's gradient is the sum over the blocks that can see it.

        Keys and values of every row (B, 2, blocks, N, S, H) -> (B, C, 2 * N * H).
        """
        if self.sliced:
            pieces = -(-self.span // self.step)
            batch_size, two, _, heads, _, head_dim = grads.shape
            total = grads.new_zeros(batch_size, two, self.blocks + pieces - 1, heads, self.step, head_dim)
            for number, piece in enumerate(grads.split(self.step, dim=4)):
                total[:, :, number : number + self.blocks, :, : piece.size(4)] += piece
            # (B, 2, blocks, N, step, H) -> (B, blocks * step, 2, N, H)
            total = total.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, self.pad_left : self.pad_left + self.keys]
        else:
            total = grads[:, :, 0].permute(0, 3, 1, 2, 4)
        # Keys behind the last slice have no gradient.
        return F.pad(total.flatten(2), (0, 0, 0, self.keys - total.size(1)))

    def unfold_queries(self, y: Tensor, batch_size: int) -> Tensor:
        """(blocks, B * N, Q, H) -> (B, T, N * H)."""
        y = y.unflatten(1, (batch_size, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2)
        return y[:, : self.length]


class Layouts:
    """The layouts of all head groups for sequences of one length: the ``mask`` of ``LocalAttention``."""

    def __init__(self, groups: Sequence[HeadGroup], length: int, device: torch.device) -> None:
        self.groups = [Layout(group, length, _query_block(group), device) for group in groups]


def _query_block(group: HeadGroup) -> int:
    """Q, a multiple of the scale; a narrow window wastes fewer scores on a short block."""
    least = _QUERY_BLOCK if group.far - group.near > _NARROW_BLOCK else _NARROW_BLOCK
    return group.factor * -(-least // group.factor)


class WindowAttention:
    """All head groups' attention as a function of the projections, keeping nothing else for backward.

    An ``OwnBackward``, one row of the batch and one group at a time.

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
            for number, pair in enumerate(self._pairs(fine, coarse, length)):
                for row in range(batch_size):
                    q, result = self._queries(number, fine[row]), self._queries(number, out[row])
                    if pair.size(1) == 0:
                        result.zero_()
                    else:
                        result.copy_(self._attention(number, row, q).forward(q, *self._keys(number, pair[row])))
        return out[:, :length]

    def backward(self, grad: Tensor, fine: Tensor, *coarse: Tensor) -> tuple[Tensor, list[Tensor]]:
        batch_size, length, _ = fine.shape
        fine, grad = self._pad(fine), self._pad(grad.to(fine.dtype))
        out, grad_fine, grad_coarse = torch.empty_like(grad), torch.empty_like(fine), []
        with torch.autocast(fine.device.type, enabled=False):
            for number, pair in enumerate(self._pairs(fine, coarse, length)):
                grad_slices = []
                for row in range(batch_size):
                    q, grad_q, result, grad_result = (
                        self._queries(number, part[row]) for part in (fine, grad_fine, out, grad)
                    )
                    if pair.size(1) == 0:
                        result.zero_()
                        grad_q.zero_()
                        continue
                    attention, keys = self._attention(number, row, q), self._keys(number, pair[row])
                    grads = attention.backward(grad_result, q, *keys, out=result)
                    grad_q.copy_(grads[0])
                    grad_slices.append(torch.stack(grads[1:]))
                if not grad_slices:
                    grad_coarse.append(torch.zeros_like(coarse[number - 1]))
                elif number == 0:
                    grad_fine[:, :length, out.size(-1) :] = self.layouts[0].add_slices(torch.stack(grad_slices))
                else:
                    grad_coarse.append(self.layouts[number].add_slices(torch.stack(grad_slices)))
        return out[:, :length], [grad_fine[:, :length], *grad_coarse]

    def _pad(self, x_BTD: Tensor) -> Tensor:
        """As many positions as the query blocks of every group need."""
        padding = max(layout.blocks * layout.query_block for layout in self.layouts) - x_BTD.size(1)
        return F.pad(x_BTD, (0, 0, 0, padding)) if padding else x_BTD

    def _columns(self) -> list[slice]:
        """The columns of every group's queries and results."""
        ends = list(itertools.accumulate((group.heads * self.head_dim for group in self.groups), initial=0))
        return [slice(*ends[number : number + 2]) for number in range(len(self.groups))]

    def _pairs(self, fine: Tensor, coarse: Sequence[Tensor], length: int) -> list[Tensor]:
        """Keys and values of every group, (B, C, 2 * N * H) with room for every slice."""
        pairs = [fine[:, :length, self._columns()[-1].stop :], *coarse]
        return [layout.pad_keys(pair) if pair.size(1) else pair for layout, pair in zip(self.layouts, pairs)]

    def _queries(self, number: int, x_TD: Tensor) -> Tensor:
        """A view (blocks, N, Q, H) of a group's columns of one row (T, ...)."""
        layout = self.layouts[number]
        own = x_TD[: layout.blocks * layout.query_block, self._columns()[number]]
        return own.view(layout.blocks, layout.query_block, -1, self.head_dim).transpose(1, 2)

    def _keys(self, number: int, pair_CD: Tensor) -> tuple[Tensor, Tensor]:
        """Views (blocks, N, S, H) of the keys and the values in overlapping slices of one row."""
        slices = self.layouts[number].slices(pair_CD).unflatten(1, (2, -1, self.head_dim))
        k, v = slices.transpose(-1, -2).unbind(1)
        return k, v

    def _attention(self, number: int, row: int, like: Tensor) -> ChunkedAttention | FusedAttention:
        """A row's attention in one group, with a seed of its own that is the same one in backward."""
        layout, seed = self.layouts[number], self.seed + (number << 40) + (row << 20)
        if self.dropout == 0.0:
            return FusedAttention(layout.bias(like.dtype), layout.sighted)
        return ChunkedAttention(layout.bias(like.dtype), False, self.dropout, seed, layout.sighted)

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
            if layout.sighted is not None:
                y = y * layout.sighted.to(y.dtype)
            heads.append(layout.unfold_queries(y, q_BTD.size(0)))
        return torch.cat(heads, dim=-1)

    def _split(self, fine: Tensor, coarse: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The queries of every group and its keys and values."""
        widths = [group.heads * self.head_dim for group in self.groups]
        *queries, pair = fine.split([*widths, 2 * widths[0]], dim=-1)
        return queries, [pair, *coarse]


class SlidingCache:
    """The last ``keep`` positions of keys and values, (B, N, position, H), addressed by absolute position.

    The buffer has room for twice as many; when it is full, what is still needed moves to its front, so a
    step costs the same at any position.
    """

    def __init__(self, batch_size: int, heads: int, head_dim: int, keep: int, like: Tensor) -> None:
        self.keep = keep
        self.buffer = torch.empty(2, batch_size, heads, 2 * keep, head_dim, dtype=like.dtype, device=like.device)
        self.first = 0
        self.end = 0

    def append(self, k_BNCH: Tensor, v_BNCH: Tensor) -> None:
        """Add C positions; only the last ``keep`` of them are kept if there are more."""
        count = k_BNCH.size(2)
        skipped = max(0, count - self.keep)
        used = self.end - self.first
        if used + count > self.buffer.size(3):
            kept = min(self.keep, used)
            if not skipped:
                self.buffer[:, :, :, :kept] = self.buffer[:, :, :, used - kept : used].clone()
            self.first = self.end - kept
            used = kept
        if skipped:
            self.first, used = self.end + skipped, 0
        self.buffer[0, :, :, used : used + count - skipped] = k_BNCH[:, :, skipped:]
        self.buffer[1, :, :, used : used + count - skipped] = v_BNCH[:, :, skipped:]
        self.end += count

    def view(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions start .. stop - 1."""
        assert self.first <= start <= stop <= self.end
        window = self.buffer[:, :, :, start - self.first : stop - self.first]
        return window[0], window[1]

    def reorder(self, order: Tensor) -> None:
        self.buffer = self.buffer.index_select(1, order)


class LocalCache:
    """What one layer of local attention remembers: the windows of every scale and each unfinished block."""

    def __init__(self, attention: LocalAttention, batch_size: int, like: Tensor) -> None:
        self.length = 0
        self.batch_size = batch_size
        self.windows = [
            SlidingCache(batch_size, group.heads, attention.head_dim, -(-group.far // group.factor) + 1, like)
            for group in attention.groups
        ]
        dim = attention.out.in_features
        self.unfinished = [
            torch.empty(batch_size, group.factor, dim, dtype=like.dtype, device=like.device)
            for group in attention.groups[1:]
        ]

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; nothing is copied when the order is the identity."""
        if is_identity(order, self.batch_size):
            return
        self.batch_size = order.numel()
        for window in self.windows:
            window.reorder(order)
        self.unfinished = [block.index_select(0, order) for block in self.unfinished]


class LocalAttention(nn.Module):
    """Multi-head attention whose heads look at several scales of the layer's input, each through its window.

    Queries come from every position. Keys and values of a coarse scale are projected from the input (after
    the layer norm, if there is one) pooled at that scale. With the single scale 1x it is plain local
    attention (Section 3.4, Listing 3, Table 4).

    Args:
        dim: model dimension D, a multiple of the number of heads
        groups: the heads by scale, 1x first
        downsampler: "avg", "max" or "conv"
        dropout: probability of dropping an attention weight
        recompute: keep less for backward
    """

    def __init__(
        self,
        dim: int,
        groups: Sequence[HeadGroup],
        downsampler: str = "avg",
        dropout: float = 0.0,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        assert groups[0].factor == 1
        assert dim % sum(group.heads for group in groups) == 0
        self.groups = list(groups)
        self.head_dim = dim // sum(group.heads for group in groups)
        self.dropout = dropout
        self.recompute = recompute
        self.fine = Linear(dim, dim + 2 * groups[0].heads * self.head_dim)
        self.pools = nn.ModuleList(Downsample(downsampler, dim, group.factor) for group in groups[1:])
        self.coarse = nn.ModuleList(Linear(dim, 2 * group.heads * self.head_dim) for group in groups[1:])
        self.out = Linear(dim, dim)

    def new_cache(self, batch_size: int, capacity: int, like: Tensor) -> LocalCache:
        """An empty cache; its size depends on the windows alone, not on ``capacity``."""
        return LocalCache(self, batch_size, like)

    def forward(
        self,
        x_BTD: Tensor,
        norm: nn.LayerNorm | None = None,
        mask: Layouts | None = None,
        cache: LocalCache | None = None,
    ) -> Tensor:
        """Attend over a whole sequence, or with a cache that has begun, at its next position.

        x (B, T, D) -> (B, T, D). ``mask`` holds the layouts of T tokens; a fresh cache is filled.
        """
        if cache is not None and cache.length > 0:
            return self._step(x_BTD, norm, cache)
        assert mask is not None
        length = x_BTD.size(1)
        fine = norm_linear(x_BTD, norm, self.fine, self.recompute)
        coarse = []
        normed = norm(x_BTD) if norm is not None and self.coarse else x_BTD
        for group, pool, project in zip(self.groups[1:], self.pools, self.coarse):
            whole = length - length % group.factor
            coarse.append(project(pool(normed[:, :whole])))
        if cache is not None:
            self._fill(cache, [fine[..., x_BTD.size(-1) :], *coarse], normed)
        dropout = self.dropout if self.training else 0.0
        attention = WindowAttention(self.groups, mask.groups, self.head_dim, dropout)
        if self.recompute and fine.device.type == "cpu":
            if torch.is_grad_enabled():
                return pointwise_linear(attention, self.out.weight, self.out.bias, fine, *coarse)
            return self.out(attention(fine, *coarse))
        return self.out(attention.by_autograd(fine, *coarse))

    def _step(self, x_B1D: Tensor, norm: nn.LayerNorm | None, cache: LocalCache) -> Tensor:
        """One more position of every row, at a cost that does not depend on how many there were."""
        normed = norm(x_B1D) if norm is not None else x_B1D
        query = cache.length
        q, fine = self.fine(normed).split([x_B1D.size(-1), self.fine.out_features - x_B1D.size(-1)], dim=-1)
        cache.windows[0].append(*self._keys_and_values(self.groups[0], fine))
        for number, group in enumerate(self.groups[1:]):
            block = cache.unfinished[number]
            block[:, query % group.factor] = normed[:, 0]
            if (query + 1) % group.factor == 0:
                pair = self.coarse[number](self.pools[number](block))
                cache.windows[number + 1].append(*self._keys_and_values(group, pair))
        cache.length += 1
        heads = []
        queries = q.split([group.heads * self.head_dim for group in self.groups], dim=-1)
        for group, window, q_group in zip(self.groups, cache.windows, queries):
            start, stop = max(0, group.first_visible(query)), group.last_visible(query) + 1
            if start >= stop:
                heads.append(torch.zeros_like(q_group))
            else:
                k, v = window.view(start, stop)
                heads.append(merge_heads(attend(split_heads(q_group, group.heads), k, v)))
        return self.out(torch.cat(heads, dim=-1))

    def _keys_and_values(self, group: HeadGroup, pair_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, 2 * N * H) -> keys and values, (B, N, C, H) each."""
        k, v = pair_BCD.unflatten(-1, (2, group.heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return k, v

    def _fill(self, cache: LocalCache, pairs: Sequence[Tensor], normed_BTD: Tensor) -> None:
        length = normed_BTD.size(1)
        for group, window, pair in zip(self.groups, cache.windows, pairs):
            window.append(*self._keys_and_values(group, pair))
        for block in cache.unfinished:
            rest = length % block.size(1)
            if rest:
                block[:, :rest] = normed_BTD[:, length - rest :]
        cache.length = length
