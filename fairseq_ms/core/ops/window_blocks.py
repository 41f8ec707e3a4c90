"""One window over blocks of tokens, by blocks of queries.

Narrow windows take J queries at a time, each block against the slice of S keys that any of them sees; wide and open
ones take their queries as full attention does. ``window_attention`` has the picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.attention import ChunkedAttention, attend
from fairseq_ms.core.ops.flash_windows import flash_attention
from fairseq_ms.core.ops.recompute import DropoutMasks, keep_in_graph
from fairseq_ms.core.scales import Scale

# Queries that share one slice of keys, if the window is wider than a narrow block, and if it is not.
_QUERY_BLOCK, _NARROW_BLOCK = 64, 32

# Keys of a slice from which on a block of queries is worth matrix products of its own.
_WIDE = 256

# Positions whose scores are in memory at a time: as few as a core's cache holds, as many as make a matrix product
# worth its call. Twice or half as many take 5 to 10 % longer on a CPU.
_PIECE = 512

# Queries, keys and values, (B, N, T, H) and twice (B, N, C, H).
Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Piece:
    """Some blocks of queries in one row of the batch, and the overlapping slices of keys that they see.

    Slices of ``span`` keys are ``step`` apart; the first begins at ``first``, below 0 before the first key.
    """

    row: int
    queries: slice
    blocks: int
    first: int
    span: int
    step: int

    def of_queries(self, x_BNTH: Tensor) -> Tensor:
        """A view (blocks, N, J, H)."""
        return x_BNTH[self.row, :, self.queries].unflatten(1, (self.blocks, -1)).transpose(0, 1)

    def seen(self, x_BNCH: Tensor) -> Tensor:
        """A view of the keys that there are."""
        return x_BNCH[self.row, :, max(self.first, 0) : self.first + (self.blocks - 1) * self.step + self.span]

    def of_keys(self, x_BNCH: Tensor) -> Tensor:
        """All slices, (blocks, N, S, H), with zeros before the first key."""
        keys = F.pad(self.seen(x_BNCH), (0, 0, -self.first, 0)) if self.first < 0 else self.seen(x_BNCH)
        return keys.unfold(1, self.span, self.step).permute(1, 0, 3, 2)

    def add(self, sums_BNCH: Tensor, grad: Tensor) -> None:
        """The transpose of ``of_keys``: a key's gradient is the sum over the slices (blocks, N, S, H) that have it."""
        sums = self.seen(sums_BNCH)
        own = F.pad(sums, (0, 0, -self.first, 0)) if self.first < 0 else sums
        for offset in range(0, self.span, self.step):
            part = grad[:, :, offset : offset + self.step].permute(1, 0, 3, 2)
            into = own[:, offset : offset + (self.blocks - 1) * self.step + part.size(3)]
            into.unfold(1, part.size(3), self.step).add_(part)
        if own is not sums:
            sums.copy_(own[:, -self.first :])


class Window:
    """Attention through one window over T tokens.

    ``forward`` and ``backward`` are for a CPU: they keep nothing but queries, keys and values. Dropout's masks are the
    same in both; the ``place`` tells them from those of other windows.
    """

    def __init__(
        self,
        scale: Scale,
        length: int,
        masks: DropoutMasks | None = None,
        place: int = 0,
        sinks_N: Tensor | None = None,
    ) -> None:
        self.factor, self.near, self.far = scale.factor, scale.near, scale.far
        self.masks, self.place, self.sinks_N = masks, place, sinks_N
        # Queries that see anything, and how many rows they are.
        # Where T is a symbol, a compiler takes far longer over a maximum of it, and over quotients below 0.
        self.queries = length - scale.near if length > scale.near else 0
        self.rows = (self.queries + self.factor - 1) // self.factor
        self.width = self.rows if scale.far is None else scale.most_blocks(length) - scale.near // self.factor
        least = _NARROW_BLOCK if self.width * self.factor <= _NARROW_BLOCK else _QUERY_BLOCK
        # Of a block of queries: its rows, and the keys that they see.
        self.step = -(-least // self.factor)
        self.span = self.step + self.width - 1

    @property
    def sliced(self) -> bool:
        """Whether blocks of queries see so much less than all keys that each is worth products of its own."""
        return self.span < _WIDE and self.span < self.rows

    def within(self, q_BNTH: Tensor, k_BNCH: Tensor, v_BNCH: Tensor) -> Heads:
        """Queries that see anything, with keys and values that are seen."""
        return q_BNTH[:, :, self.near :], k_BNCH[:, :, : self.rows], v_BNCH[:, :, : self.rows]

    def forward(self, heads: Heads, out_BNTH: Tensor) -> None:
        """Write what queries see."""
        out_BNTH[:, :, : self.near] = 0.0
        (q, k, v), out = self.within(*heads), out_BNTH[:, :, self.near :]
        if not self.sliced:
            if self.queries:
                self._whole().forward(q, k, v, out)
            return
        for piece, attention in self._pieces(q):
            attention.forward(piece.of_queries(q), piece.of_keys(k), piece.of_keys(v), piece.of_queries(out))

    def backward(
        self, grad_BNTH: Tensor, heads: Heads, grads: Heads, out_BNTH: Tensor | None, grad_sinks_N: Tensor | None
    ) -> None:
        """Write the gradients of queries, keys and values; add that of the sinks.

        What queries see is written once more into ``out``, if there is one.
        """
        for x in (grads[0], out_BNTH):
            if x is not None:
                x[:, :, : self.near] = 0.0
        grads[1][:, :, self.rows :] = grads[2][:, :, self.rows :] = 0.0
        (q, k, v), (grad_q, grad_k, grad_v) = self.within(*heads), self.within(*grads)
        grad, out = grad_BNTH[:, :, self.near :], None if out_BNTH is None else out_BNTH[:, :, self.near :]
        if not self.sliced:
            own = self._whole().backward(grad, q, k, v, out, grad_sinks_N) if self.queries else ()
            for into, part in zip((grad_q, grad_k, grad_v), own):
                into.copy_(part)
            return
        grad_k.zero_()
        grad_v.zero_()
        for piece, attention in self._pieces(q):
            parts = piece.of_queries(grad), piece.of_queries(q), piece.of_keys(k), piece.of_keys(v)
            again = None if out is None else piece.of_queries(out)
            own_q, own_k, own_v = attention.backward(*parts, again, grad_sinks_N)
            piece.of_queries(grad_q).copy_(own_q)
            piece.add(grad_k, own_k)
            piece.add(grad_v, own_v)

    def _whole(self) -> ChunkedAttention:
        """For all queries at once."""
        shape = self.factor, self.width if self.width < self.rows else None
        return ChunkedAttention(None, True, self.masks, (self.place,), *shape, self.sinks_N)

    def _pieces(self, q: Tensor) -> Iterator[tuple[_Piece, ChunkedAttention]]:
        """Blocks of queries, some at a time, in one row of the batch."""
        block, bias_JS = self.step * self.factor, self.band(self.step, q)
        whole, rest = divmod(self.queries, block)
        at_once = max(1, _PIECE // block)
        pieces = [(start, min(at_once, whole - start), block) for start in range(0, whole, at_once)]
        for start, blocks, count in [*pieces, *([(whole, 1, rest)] if rest else [])]:
            queries = slice(start * block, start * block + blocks * count)
            first, span = start * self.step - self.width + 1, -(-count // self.factor) + self.width - 1
            bias = bias_JS[:count, :span]
            if first < 0:
                bias = self._after_the_first(bias, blocks, -first, self.step)
            for row in range(q.size(0)):
                piece = _Piece(row, queries, blocks, first, span, self.step)
                place = self.place, row, start
                yield piece, ChunkedAttention(bias, False, self.masks, place, sinks_N=self.sinks_N)

    def band(self, rows: int, like: Tensor) -> Tensor:
        """What the queries of some rows see of the keys from ``width - 1`` before the first row on: a bias (J, S)."""
        row = torch.arange(rows * self.factor, device=like.device)[:, None] // self.factor
        key = torch.arange(rows + self.width - 1, device=like.device)
        hidden = (key < row) | (key >= row + self.width)
        return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    @staticmethod
    def _after_the_first(bias_JS: Tensor, blocks: int, before: int, step: int) -> Tensor:
        """The same in slices of which the first begins so many keys before the first one: (blocks, 1, J, S)."""
        starts = torch.arange(blocks, device=bias_JS.device)[:, None] * step
        keys = starts + torch.arange(bias_JS.size(1), device=bias_JS.device)
        return bias_JS.masked_fill((keys < before)[:, None, None], -torch.inf)

    def by_autograd(self, heads: Heads, dropout: float, flash: torch.dtype | None = None) -> Tensor:
        """What queries see, (B, T, N, H): by flash kernels in half precision, or by attention that runs everywhere."""
        if not self.queries:
            # Zeros that still lead back to all parameters: distributed training waits for every gradient.
            sinks = [] if self.sinks_N is None else [self.sinks_N]
            return keep_in_graph(torch.zeros_like(heads[0]), [*heads, *sinks]).transpose(1, 2)
        (q, k, v), sinks_N = self.within(*heads), self.sinks_N
        if flash is not None and (self.factor > 1 or self.far is not None or sinks_N is not None):
            width = None if self.far is None else self.width
            keys = k.transpose(1, 2), v.transpose(1, 2)
            y_BTNH = self._of_rows(flash_attention(self._rows(q), *keys, width, dropout, sinks_N, flash))
        elif self.width >= self.rows:
            if self.factor > 1:
                k, v = (x.repeat_interleave(self.factor, 1) for x in (k, v))
                sinks_N = None if sinks_N is None else sinks_N.repeat_interleave(self.factor)
            y_BNRH = attend(self._rows(q).transpose(1, 2), k, v, None, True, dropout, False, sinks_N)
            y_BTNH = self._of_rows(y_BNRH.transpose(1, 2))
        else:
            # So that no more than five times as many keys are copied as there are.
            step = max(self.step, self.width // 4)
            blocks, span = (self.rows + step - 1) // step, step + self.width - 1
            q = F.pad(q, (0, 0, 0, blocks * step * self.factor - self.queries)).unflatten(2, (blocks, -1))
            padded = [F.pad(x, (0, 0, self.width - 1, blocks * step - self.rows)) for x in (k, v)]
            k, v = (x.unfold(2, span, step).transpose(-1, -2) for x in padded)
            bias = self._after_the_first(self.band(step, q), blocks, self.width - 1, step).squeeze(1)
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B * N, blocks, J or S, H)
            sinks_N1 = None if sinks_N is None else sinks_N.repeat(heads[0].size(0)).unsqueeze(1)
            y = attend(q, k, v, bias, False, dropout, False, sinks_N1)
            y_BTNH = y.unflatten(0, heads[0].shape[:2]).flatten(2, 3)[:, :, : self.queries].transpose(1, 2)
        return F.pad(y_BTNH, (0, 0, 0, 0, self.near, 0)) if self.near else y_BTNH

    def _rows(self, q_BNTH: Tensor) -> Tensor:
        """Queries by row, of which k share a head of keys, (B, R, N * k, H)."""
        q_BTNH, more = q_BNTH.transpose(1, 2), self.rows * self.factor - self.queries
        if self.factor == 1:
            return q_BTNH
        q_BTNH = F.pad(q_BTNH, (0, 0, 0, 0, 0, more)) if more else q_BTNH
        return q_BTNH.unflatten(1, (self.rows, self.factor)).transpose(2, 3).flatten(2, 3)

    def _of_rows(self, y_BRGH: Tensor) -> Tensor:
        """The transpose of ``_rows``: (B, T, N, H)."""
        if self.factor == 1:
            return y_BRGH
        return y_BRGH.unflatten(2, (-1, self.factor)).transpose(2, 3).flatten(1, 2)[:, : self.queries]
