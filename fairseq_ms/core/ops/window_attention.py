"""Attention through a window over blocks of tokens, forward and backward, at a cost linear in the number of tokens.

The keys of a scale k are blocks of k tokens. Block j is visible at query t iff it is finished and its first token lies
in the window, near <= t - j k < far (Multi-scale Transformer LMs, Section 3.4, Figure 1e). Where near and far are
multiples of k, all k queries of a row see the same blocks: after the first ``near`` queries, which see none, row r
sees the blocks r - w + 1 .. r, with w = (far - near) / k. A window over blocks is a causal window over rows, whose k
queries share what they see::

    k = 2, window 2:6 (w = 2)      blocks    0 1 2 3
        t = 0, 1                             . . . .      zero
        t = 2, 3                   row 0     x . . .
        t = 4, 5                   row 1     x x . .
        t = 6, 7                   row 2     . x x .

On a CPU, narrow windows take blocks of J queries, each against the slice of S keys that any of them sees; wide and open
ones take their queries in chunks, as full attention does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_ms.core.ops.attention import ChunkedAttention, attend, values_of, zeros_like
from fairseq_ms.core.ops.linear import weight_gradients
from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import DropoutMasks, keep_in_graph
from fairseq_ms.core.scales import Scale, check_window

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


class _Window:
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
        self.factor, self.near, self.masks, self.place, self.sinks_N = scale.factor, scale.near, masks, place, sinks_N
        # Queries that see anything, and how many rows they are.
        self.queries = max(length - scale.near, 0)
        self.rows = -(-self.queries // self.factor)
        self.width = self.rows if scale.far is None else scale.most_blocks(length) - scale.near // self.factor
        least = _NARROW_BLOCK if self.width * self.factor <= _NARROW_BLOCK else _QUERY_BLOCK
        # Of a block of queries: its rows, and the keys that they see.
        self.step = -(-least // self.factor)
        self.span = self.step + self.width - 1
        self.sliced = self.span < min(self.rows, _WIDE)

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
        return ChunkedAttention(None, True, self.masks, (self.place,), *shape, values_of(self.sinks_N))

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
                bias = self._after_the_first(bias, blocks, -first)
            for row in range(q.size(0)):
                piece = _Piece(row, queries, blocks, first, span, self.step)
                place = self.place, row, start
                yield piece, ChunkedAttention(bias, False, self.masks, place, sinks_N=values_of(self.sinks_N))

    def band(self, rows: int, like: Tensor) -> Tensor:
        """What the queries of some rows see of the keys from ``width - 1`` before the first row on: a bias (J, S)."""
        row = torch.arange(rows * self.factor, device=like.device)[:, None] // self.factor
        key = torch.arange(rows + self.width - 1, device=like.device)
        hidden = (key < row) | (key >= row + self.width)
        return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def _after_the_first(self, bias_JS: Tensor, blocks: int, before: int) -> Tensor:
        """The same in slices of which the first begins so many keys before the first one: (blocks, 1, J, S)."""
        starts = torch.arange(blocks, device=bias_JS.device)[:, None] * self.step
        keys = starts + torch.arange(bias_JS.size(1), device=bias_JS.device)
        return bias_JS.masked_fill((keys < before)[:, None, None], -torch.inf)

    def by_autograd(self, heads: Heads, dropout: float) -> Tensor:
        """What queries see, (B, N, T, H), by torch's own attention, which keeps more and runs on every device."""
        if not self.queries:
            # Zeros that still lead back to all parameters: distributed training waits for every gradient.
            sinks = [] if self.sinks_N is None else [self.sinks_N]
            return keep_in_graph(torch.zeros_like(heads[0]), [*heads, *sinks])
        (q, k, v), sinks_N = self.within(*heads), self.sinks_N
        if self.factor == 1 and self.width >= self.rows:
            y = attend(q, k, v, None, True, dropout, False, sinks_N)
        elif self.span >= self.rows:
            bias = self.band(self.rows, q)[: self.queries, self.width - 1 :]
            y = attend(q, k, v, bias, False, dropout, False, sinks_N)
        else:
            blocks, block = -(-self.rows // self.step), self.step * self.factor
            q = F.pad(q, (0, 0, 0, blocks * block - self.queries)).unflatten(2, (blocks, block))
            padded = [F.pad(x, (0, 0, self.width - 1, blocks * self.step - self.rows)) for x in (k, v)]
            k, v = (x.unfold(2, self.span, self.step).transpose(-1, -2) for x in padded)
            bias = self._after_the_first(self.band(self.step, q), blocks, self.width - 1).squeeze(1)
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B * N, blocks, J or S, H)
            sinks_N1 = None if sinks_N is None else sinks_N.repeat(heads[0].size(0)).unsqueeze(1)
            y = attend(q, k, v, bias, False, dropout, False, sinks_N1)
            y = y.unflatten(0, heads[0].shape[:2]).flatten(2, 3)[:, :, : self.queries]
        return F.pad(y, (0, 0, self.near, 0))


class LayerWindows:
    """All windows of a layer, on its projections.

    These are ``fine``, (B, T, D + 2 * N * H), queries of all windows beside keys and values of those at 1x; and of
    every other factor k keys beside values, (B, T // k, 2 * N * H).

    Args:
        scales: the windows with their heads, those of one factor side by side, 1x first
        head_dim: H
        dropout: probability of dropping an attention weight
        sinks_N: of all heads in this order, as in ``attention.attend``
    """

    def __init__(
        self, scales: Sequence[Scale], head_dim: int, dropout: float = 0.0, sinks_N: Tensor | None = None
    ) -> None:
        self.scales, self.head_dim, self.dropout, self.sinks_N = scales, head_dim, dropout, sinks_N
        self.masks: DropoutMasks | None = None

    def heads(self, fine: Tensor, *coarse: Tensor) -> list[Heads]:
        """By window, views of its queries, keys and values."""
        width = self.head_dim * sum(scale.heads for scale in self.scales)
        pairs = dict(zip(dict.fromkeys(scale.factor for scale in self.scales), [fine[..., width:], *coarse]))
        taken, found = dict.fromkeys(pairs, 0), []
        for scale, q in zip(self.scales, self.split(fine[..., :width])):
            own = slice(taken[scale.factor], taken[scale.factor] + scale.heads)
            taken[scale.factor] = own.stop
            # (B, C, 2 * N * H) -> keys and values, (B, N, C, H) each
            k, v = pairs[scale.factor].unflatten(-1, (2, -1, self.head_dim)).permute(2, 0, 3, 1, 4)[:, :, own]
            found.append((q, k, v))
        return found

    def split(self, x_BTD: Tensor) -> Sequence[Tensor]:
        """(B, T, D) -> by window, (B, N, T, H)."""
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split([s.heads for s in self.scales], dim=1)

    def forward(self, *inputs: Tensor) -> Tensor:
        """What all heads see, (B, T, D)."""
        # Here, since torch's own attention draws masks of its own.
        self.masks = DropoutMasks(self.dropout) if self.dropout > 0.0 else None
        heads = self.heads(*inputs)
        rows, length = heads[0][0].size(0), heads[0][0].size(2)
        out_BTD = inputs[0].new_empty(rows, length, self.head_dim * sum(scale.heads for scale in self.scales))
        for window, own, out in zip(self.windows(length), heads, self.split(out_BTD)):
            window.forward(own, out)
        return out_BTD

    def backward(
        self, grad_BTD: Tensor, *inputs: Tensor, again: bool = True
    ) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
        """The result once more, if asked for, and the gradients of the inputs and sinks given that of the result."""
        out_BTD, grads = torch.empty_like(grad_BTD) if again else None, [torch.empty_like(x) for x in inputs]
        grad_sinks_N, windows = zeros_like(self.sinks_N), self.windows(grad_BTD.size(1))
        outs = self.split(out_BTD) if out_BTD is not None else [None] * len(windows)
        each = self.split(grad_BTD), self.heads(*inputs), self.heads(*grads), outs, self.by_window(grad_sinks_N)
        for window, grad, own, into, out, grad_sinks in zip(windows, *each):
            window.backward(grad, own, into, out, grad_sinks)
        return out_BTD, grads, grad_sinks_N

    def by_autograd(self, *inputs: Tensor) -> Tensor:
        """The same as ``forward``, of torch's own attention."""
        heads = self.heads(*inputs)
        windows = zip(self.windows(heads[0][0].size(2)), heads)
        return (
            torch.cat([window.by_autograd(own, self.dropout) for window, own in windows], 1).transpose(1, 2).flatten(2)
        )

    def windows(self, length: int) -> list[_Window]:
        """Those over T tokens."""
        own = zip(self.scales, self.by_window(self.sinks_N))
        return [_Window(scale, length, self.masks, place, sinks) for place, (scale, sinks) in enumerate(own)]

    def by_window(self, sinks_N: Tensor | None) -> Sequence[Tensor | None]:
        """Those of each one's heads."""
        counts = [scale.heads for scale in self.scales]
        return [None] * len(counts) if sinks_N is None else sinks_N.split(counts)


class _OneWindow(LayerWindows):
    """A window, on queries, keys and values by head."""

    def heads(self, q: Tensor, *keys: Tensor) -> list[Heads]:
        k, v = keys
        return [(q, k, v)]


class _Attended(torch.autograd.Function):
    """``LayerWindows``, and the projection after it if there is one, keeping the inputs alone."""

    @staticmethod
    def forward(
        ctx,
        windows: LayerWindows,
        weight_OI: Tensor | None,
        bias_O: Tensor | None,
        sinks_N: Tensor | None,
        *inputs: Tensor,
    ):
        # The sinks are those of the windows: autograd sees them here.
        ctx.windows, ctx.has_bias = windows, bias_O is not None
        ctx.save_for_backward(weight_OI, *inputs)
        with torch.autocast("cpu", enabled=False):
            attended = windows.forward(*inputs)
        return attended if weight_OI is None else F.linear(attended, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weight_OI, *inputs = ctx.saved_tensors
        grad_attended = grad if weight_OI is None else (grad @ weight_OI.to(grad.dtype)).to(inputs[0].dtype)
        with torch.autocast("cpu", enabled=False):
            attended, grads, grad_sinks_N = ctx.windows.backward(grad_attended, *inputs, again=weight_OI is not None)
        own = (None, None) if attended is None else weight_gradients(grad, attended, ctx.has_bias)
        return None, *own, grad_sinks_N, *grads


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, factor: int = 1, near: int = 0, far: int | None = None, dropout: float = 0.0
) -> Tensor:
    """What queries see of blocks of ``factor`` tokens through the window near:far, (B, N, T, H); zero where nothing.

    Softmax attention of query t to the blocks j with near <= t - j * factor < far, from the beginning of texts, at a
    cost that grows with T and the width of the window. ``naive.window_attention`` says it in a few lines.

    Args:
        q: (B, N, T, H)
        k: of the whole blocks of the T tokens, (B, N, T // factor, H)
        v: of the same
        factor: tokens of a block
        near: in tokens, a multiple of ``factor``, and at least that for blocks, since the newest is unfinished
        far: in tokens, a multiple of ``factor``; None sees everything
        dropout: probability of dropping an attention weight

    Raises ValueError for other bounds and other shapes.
    """
    check_window(Scale(factor, near=near, far=far), "near and far")
    wanted = (*q.shape[:2], q.size(2) // factor, q.size(3)) if q.dim() == 4 else None
    if wanted is None or k.shape != wanted or v.shape != wanted:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q must be (B, N, T, H), k and v (B, N, T // {factor}, H): got {shapes}")
    windows = _OneWindow([Scale(factor, near=near, far=far, heads=q.size(1))], q.size(3), dropout)
    attended = _Attended.apply(windows, None, None, None, q, k, v) if _in_blocks(q) else windows.by_autograd(q, k, v)
    return windows.split(attended)[0]


def _in_blocks(x: Tensor) -> bool:
    """Whether blocks of queries are what is fastest, with a backward pass of their own."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def window_attention_linear(windows: LayerWindows, inputs: Sequence[Tensor], out: nn.Linear, recompute: bool) -> Tensor:
    """Attention through all windows of a layer, and the projection after it: (B, T, D) -> (B, T, D).

    Its naive twin is ``naive.window_attention`` of every window's heads. On a CPU, with ``recompute``, the inputs alone
    are kept for backward.
    """
    if not (recompute and _in_blocks(inputs[0])):
        return out(windows.by_autograd(*inputs))
    if torch.is_grad_enabled() and plain(out):
        return _Attended.apply(windows, out.weight, out.bias, windows.sinks_N, *inputs)
    return out(_Attended.apply(windows, None, None, windows.sinks_N, *inputs))
