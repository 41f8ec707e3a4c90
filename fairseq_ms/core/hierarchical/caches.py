"""Attention and KV caches for sequences of unequal lengths, and the state of HAED and HRED."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.cache import Reorderable, State
from fairseq_ms.core.hierarchical.chunks import Unfinished
from fairseq_ms.core.hierarchical.config import HAEDConfig
from fairseq_ms.core.layers import TransformerStack
from fairseq_ms.core.ops.attention import attend, merge_heads, split_qkv
from fairseq_ms.core.ops.linear import convolve, pad_left
from fairseq_ms.core.ops.lstm import LSTMState, RaggedSteps


@dataclass(frozen=True)
class Rectangles:
    """Causal attention within sequences that lie one after the other, those of equal length as one rectangle.

    Attributes:
        shapes: (number of sequences, their length) of each rectangle, in order
        cache: takes in the keys and values of positions ``cached_X``, if there is one
        last_B: the sequence that each row of the cache is in
    """

    shapes: Sequence[tuple[int, int]]
    cache: RowCache | None = None
    cached_X: Tensor | None = None
    last_B: Tensor | None = None

    def convolved(self, x_QD: Tensor, weight_ND: Tensor) -> Tensor:
        """``ShortConv`` of all positions (Q, D), within sequences; the cache takes in the last N of its rows."""
        shapes = [(count, length, -1) for count, length in self.shapes]
        parts = x_QD.split([count * length for count, length in self.shapes])
        joined = [pad_left(part.view(shape), weight_ND) for part, shape in zip(parts, shapes, strict=True)]
        if self.cache is not None and self.last_B is not None:
            last_WND = torch.cat([part[:, -len(weight_ND) :] for part in joined])
            self.cache.remember(last_WND.index_select(0, self.last_B))
        return torch.cat([convolve(part, weight_ND).flatten(0, 1) for part in joined])

    def attend(self, qkv: Tensor, heads: int, dropout: float, recompute: bool, sinks_N: Tensor | None = None) -> Tensor:
        """Projected queries, keys and values of all positions (Q, 3 * N * H) -> (Q, N * H); there is no padding."""
        if self.cache is not None:
            self.cache.write(qkv[self.cached_X], heads)
        outputs = []
        parts = qkv.split([count * length for count, length in self.shapes])
        for part, (count, length) in zip(parts, self.shapes, strict=True):
            q, k, v = split_qkv(part.view(count, length, -1), heads)
            y_BNTH = attend(q, k, v, None, True, dropout, recompute, sinks_N)
            outputs.append(merge_heads(y_BNTH).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True)
class RowCache:
    """One layer's keys and values (2, B, N, S, H), and where the next positions go.

    Attributes:
        caches: those of all layers
        layer: index of the layer
        row_X, place_X: rows and places that are written next, which broadcast to one shape
        bias: (R, 1, C, S), lets each of C new positions of R rows see its own row up to itself
        counts_R: new positions of each row; the rest of C is padding
    """

    caches: RowCaches
    layer: int
    row_X: Tensor
    place_X: Tensor
    bias: Tensor | None = None
    counts_R: Tensor | None = None

    @property
    def buffer(self) -> Tensor:
        """The layer's keys and values."""
        return self.caches.buffers[self.layer]

    def convolved(self, x: Tensor, weight_ND: Tensor) -> Tensor:
        """``ShortConv`` of C more positions of R rows (..., D); keeps the last N of each row."""
        assert self.counts_R is not None
        inputs, rows_R = self.caches.inputs_BLND, self.row_X.squeeze(1)
        joined = torch.cat([inputs[rows_R, self.layer], x.view(len(rows_R), -1, x.size(-1))], dim=1)
        place_RN = self.counts_R.unsqueeze(1) + torch.arange(len(weight_ND), device=x.device)
        self.remember(joined.gather(1, place_RN.unsqueeze(2).expand(-1, -1, x.size(-1))), rows_R)
        return convolve(joined, weight_ND).view_as(x)

    def remember(self, last_RND: Tensor, rows_R: Tensor | slice = slice(None)) -> None:
        """Keep the last N inputs of some rows, or of all."""
        self.caches.inputs_BLND[rows_R, self.layer] = last_RND.to(self.caches.inputs_BLND.dtype)

    def write(self, qkv: Tensor, heads: int) -> None:
        """Write the keys and values of projected (X, 3 * N * H)."""
        _, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
        self.buffer[0, self.row_X, :, self.place_X] = k.to(self.buffer.dtype)
        self.buffer[1, self.row_X, :, self.place_X] = v.to(self.buffer.dtype)

    def attend(self, qkv: Tensor, heads: int, dropout: float, recompute: bool, sinks_N: Tensor | None = None) -> Tensor:
        """Causal attention of C more positions of R rows: projected (..., 3 * N * H) -> (..., N * H)."""
        assert self.bias is not None
        rows, _, count, seen = self.bias.shape
        qkv_RCE = qkv.view(rows, count, -1)
        self.write(qkv_RCE, heads)
        kept = self.buffer[:, :, :, :seen]
        # Rows ascend, so B of them are all.
        k, v = kept if rows == self.buffer.shape[1] else kept.index_select(1, self.row_X.squeeze(1))
        y_RNCH = attend(split_qkv(qkv_RCE, heads)[0], k, v, self.bias, False, dropout, recompute, sinks_N)
        return merge_heads(y_RNCH).view(*qkv.shape[:-1], -1)


class RowCaches:
    """KV caches of a stack, (layers, 2, B, N, S, H), whose rows have lengths of their own.

    Also the last inputs (B, layers, N, D) of its short convolutions, if it has any. There is room for ``capacity``
    positions, which doubles when a row is full; type and device are those of ``like``.
    """

    def __init__(self, stack: TransformerStack, rows: int, capacity: int, like: Tensor) -> None:
        attention = next(iter(stack.layers)).attention
        shape = (len(stack.layers), 2, rows, attention.heads, max(capacity, 1), attention.head_dim)
        # Zeros, since what a bias hides must be finite.
        self.buffers = like.new_zeros(shape)
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=like.device)
        self.inputs_BLND = like.new_zeros(rows, len(stack.layers), stack.config.short_conv, stack.config.dim)

    def reorder(self, order: Tensor) -> None:
        self.buffers = self.buffers.index_select(2, order)
        self.lengths_B = self.lengths_B.index_select(0, order)
        self.inputs_BLND = self.inputs_BLND.index_select(0, order)

    def extend(self, row_R: Tensor, counts_R: Tensor, most: int) -> list[RowCache]:
        """The caches of all layers, for ``counts_R`` more positions of rows ``row_R``, padded to ``most``."""
        place_RC = self.lengths_B[row_R].unsqueeze(1) + torch.arange(most, device=row_R.device)
        seen = int(place_RC.max()) + 1
        self.reserve(seen)
        hidden_RCS = torch.arange(seen, device=row_R.device) > place_RC.unsqueeze(2)
        bias = self.buffers.new_zeros(hidden_RCS.shape).masked_fill_(hidden_RCS, -torch.inf).unsqueeze(1)
        self.lengths_B = self.lengths_B.index_add(0, row_R, counts_R)
        where = row_R.unsqueeze(1), place_RC, bias, counts_R
        return [RowCache(self, layer, *where) for layer in range(len(self.buffers))]

    def reserve(self, positions: int) -> None:
        """Make room for so many positions in every row."""
        capacity = self.buffers.size(4)
        if positions > capacity:
            self.buffers = F.pad(self.buffers, (0, 0, 0, max(positions, 2 * capacity) - capacity))


class ChunkCaches:
    """State of a transformer decoder in the unfinished chunk of every row.

    Attributes:
        table_VU: the projected embeddings of all symbols
        context_BU: the projected main output of each row
        layers: KV caches
    """

    def __init__(self, stack: TransformerStack, rows: int, length: int, table_VU: Tensor) -> None:
        self.table_VU = table_VU
        self.context_BU = table_VU.new_zeros(rows, table_VU.shape[1])
        self.layers = RowCaches(stack, rows, length, table_VU)

    def begin(self, rows_R: Tensor, context_RU: Tensor) -> None:
        """Begin a chunk in some rows, with a new context."""
        self.context_BU = self.context_BU.index_copy(0, rows_R, context_RU)
        self.layers.lengths_B = self.layers.lengths_B.index_fill(0, rows_R, 0)
        self.layers.inputs_BLND = self.layers.inputs_BLND.index_fill(0, rows_R, 0.0)

    def unfinished(self, steps: RaggedSteps, at_Q: Tensor) -> list[Rectangles]:
        """How each layer attends within whole texts, keeping their last chunks; step q lies at row ``at_Q[q]``."""
        kept_B = steps.kept_B
        assert kept_B is not None
        self.layers.lengths_B = steps.lengths_W[kept_B]
        row_B = torch.arange(len(kept_B), device=kept_B.device)
        row_W = torch.full_like(steps.lengths_W, -1).index_copy_(0, kept_B, row_B)
        row_Q = row_W[steps.sequence_Q]
        cached_X = (row_Q >= 0).nonzero().squeeze(1)
        where = row_Q[cached_X], steps.place_Q[cached_X]
        caches = [RowCache(self.layers, layer, *where) for layer in range(len(self.layers.buffers))]
        last_B = steps.rank_W[kept_B]
        return [Rectangles(steps.rectangles, cache, at_Q[cached_X], last_B) for cache in caches]

    def reorder(self, order: Tensor) -> None:
        self.context_BU = self.context_BU.index_select(0, order)
        self.layers.reorder(order)


class HAEDState(State):
    """The states of main model and chunk decoder, and the unfinished chunk of every row."""

    def __init__(
        self, config: HAEDConfig, main: RowCaches | LSTMState, decoder: LSTMState | ChunkCaches, unfinished: Unfinished
    ) -> None:
        super().__init__(config, unfinished.place_B.numel())
        self.main, self.decoder, self.unfinished = main, decoder, unfinished

    def parts(self) -> Iterable[Reorderable]:
        return self.main, self.decoder, self.unfinished
