"""Softmax attention that keeps no scores for backward, and what reshapes queries, keys and values for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_ms.core.ops.linear import weight_gradients
from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import DropoutMasks, saves

# Queries whose scores are in memory at a time; few enough for them to stay in a core's cache.
_QUERY_CHUNK = 64


def attend(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    recompute: bool = True,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(H) + bias) v, of shape (B, N, T, H).

    ``bias`` is additive and broadcasts to (B, N, T, S); every row must have a finite entry. ``causal``
    lets query t see keys 0 .. t + S - T (the queries are the last of the keys) and excludes a bias.
    ``sinks``, which broadcast to (B, N), are scores of a key of every head that all queries see, and whose value is
    zero.
    Dropout on a CPU goes through a path of our own, because torch's keeps all score matrices there;
    ``recompute=False`` takes torch's.
    """
    assert not (causal and bias is not None)
    on_cpu = q_BNTH.device.type == "cpu"
    if dropout > 0.0 and recompute and on_cpu and saves():
        attention = ChunkedAttention(bias, causal, DropoutMasks(dropout), sinks_N=sinks_N)
        own = _Heads(attention, q_BNTH.size(1))
        return split_heads(Attended.apply(own, None, None, sinks_N, q_BNTH, k_BNSH, v_BNSH), own.heads)
    queries, keys = q_BNTH.size(2), k_BNSH.size(2)
    if causal and queries == 1:
        causal = False
    if sinks_N is not None:
        return _attend_with_sinks(q_BNTH, k_BNSH, v_BNSH, bias, causal, dropout, sinks_N)
    if causal and queries != keys:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q_BNTH.device)
        causal, bias = False, ones.tril_(keys - queries)
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=bias, dropout_p=dropout, is_causal=causal)


def _attend_with_sinks(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    bias: Tensor | None,
    causal: bool,
    dropout: float,
    sinks_N: Tensor,
) -> Tensor:
    """As ``attend``, by torch's kernels, for which the sink is a key in front of the others."""
    (queries, width), keys = q_BNTH.shape[2:], k_BNSH.size(2)
    sinks_N11 = sinks_N.to(q_BNTH.dtype)[..., None, None]
    if queries == 1:  # without a copy of a cache
        scores = (q_BNTH * width**-0.5) @ k_BNSH.transpose(2, 3)
        scores = scores if bias is None else scores + bias
        scores = torch.cat([scores, sinks_N11.expand(*scores.shape[:2], 1, 1)], dim=-1)
        return F.dropout(scores.softmax(-1)[..., :-1], dropout) @ v_BNSH
    # One more channel, of eight for their alignment, has the score of the sink: queries have 1 there, other keys 0.
    q, k, v = F.pad(q_BNTH, (0, 8)), F.pad(k_BNSH, (0, 8, 1, 0)), F.pad(v_BNSH, (0, 8, 1, 0))
    sink_1H = F.pad(q.new_ones(1, 1), (width, 7))
    q, k = q + sink_1H, k + F.pad(sinks_N11 * sink_1H * width**0.5, (0, 0, 0, keys))
    square = False
    if causal and queries == keys:  # so that the first query is that of the first key, as torch wants it
        q, square = F.pad(q, (0, 0, 1, 0)), True
    elif causal:
        bias = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)
    if bias is not None:
        bias = F.pad(bias, (1, 0), value=1.0 if bias.dtype == torch.bool else 0.0)
    scale = width**-0.5
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=square, scale=scale)
    return y[:, :, int(square) :, :width]


@dataclass(frozen=True)
class ChunkedAttention:
    """Attention that is computed again in backward, so that nothing but its inputs has to be kept.

    Queries are processed in chunks, forward and backward, and no score outlives its chunk. Dropout masks are the
    same in both directions. Several operations work in place, since masking would otherwise take longer on a CPU than
    the products.

    Attributes:
        bias: additive, broadcasts to (B, N, T, S), or None
        causal: as in ``attend``; excludes a bias
        masks: the masks of dropout, or None for no dropout
        place: tells the masks of this attention from those of others with the same ``masks``
        factor: with ``causal``, how many queries share a row: there is a key a row, and query i sees those up to
            row i // factor
        width: with ``causal``, how many of them it sees at most
        sinks_N: as in ``attend``
    """

    bias: Tensor | None
    causal: bool
    masks: DropoutMasks | None = None
    place: tuple[int, ...] = ()
    factor: int = 1
    width: int | None = None
    sinks_N: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """q (B, N, T, H), k and v (B, N, S, H) -> (B, N, T, H), with the heads of a position side by side.

        The result is written into ``out``, if there is one.
        """
        if out is None:
            out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        q3, k3, v3 = self._scaled(q), k.flatten(0, 1), v.flatten(0, 1)
        for index, (rows, visible) in enumerate(self._chunks(q, k)):
            weights, _ = self._weights(q3[:, rows], k3[:, visible], rows, q.shape[:2])
            if self.masks is not None:
                weights.mul_(self.masks.keep(weights, index, self.place))
            out[:, :, rows] = torch.bmm(weights, v3[:, visible]).unflatten(0, q.shape[:2])
        return out.mul_(1.0 / self.masks.keep_prob) if self.masks is not None else out

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        grad_sinks_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; the result of ``forward`` is written into ``out``, if there is one.

        The gradient of the sinks is added to ``grad_sinks``.
        """
        scale = 1.0 / math.sqrt(q.size(-1))
        grad3, q3, k3, v3 = grad.flatten(0, 1), self._scaled(q), k.flatten(0, 1), v.flatten(0, 1)
        if self.masks is not None:
            grad3 = grad3 * (1.0 / self.masks.keep_prob)
        fresh = torch.empty_like if self.width is None else torch.zeros_like
        grad_q, grad_k, grad_v = torch.empty_like(q3), fresh(k3), fresh(v3)
        # The last chunk first: without a width it sees every key, so it fills all of the fresh gradients.
        chunks = list(enumerate(self._chunks(q, k)))
        for index, (rows, visible) in reversed(chunks):
            weights, sunk = self._weights(q3[:, rows], k3[:, visible], rows, q.shape[:2])
            grad_weights = torch.bmm(grad3[:, rows], v3[:, visible].transpose(1, 2))
            dropped = weights
            if self.masks is not None:
                keep = self.masks.keep(weights, index, self.place)
                grad_weights.mul_(keep)
                dropped = keep.mul_(weights)
            if out is not None:
                out[:, :, rows] = torch.bmm(dropped, v3[:, visible]).unflatten(0, q.shape[:2])
            kept = 0.0 if self.width is None and index == len(chunks) - 1 else 1.0
            grad_v[:, visible].baddbmm_(dropped.transpose(1, 2), grad3[:, rows], beta=kept)
            if grad_sinks_N is not None:
                # What is given to the sink is taken from all others; its value being zero, it has no gradient itself.
                taken = (grad_weights * weights).sum(-1).mul_(sunk.squeeze(-1))
                grad_sinks_N -= taken.unflatten(0, q.shape[:2]).sum((0, 2))
            grad_scores = torch._softmax_backward_data(grad_weights, weights.contiguous(), -1, weights.dtype)
            grad_q[:, rows] = torch.bmm(grad_scores, k3[:, visible])
            grad_k[:, visible].baddbmm_(grad_scores.transpose(1, 2), q3[:, rows], beta=kept)
        if out is not None and self.masks is not None:
            out.mul_(1.0 / self.masks.keep_prob)
        return grad_q.mul_(scale).view(q.shape), grad_k.view(k.shape), grad_v.view(v.shape)

    def _scaled(self, q: Tensor) -> Tensor:
        """The queries (B * N, T, H), divided by sqrt(H)."""
        # Copied into the layout that the product wants: the heads of q are views into a wider tensor. Written there by
        # ``torch.mul(out=...)``, it would keep the layout of q under ``torch.compile``.
        scaled = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return scaled.copy_(q).mul_(1.0 / math.sqrt(q.size(-1))).flatten(0, 1)

    def _chunks(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
        """Slices of queries, each with that of the keys its queries can see: from its first's to its last's."""
        queries, keys, chunk = q.size(2), k.size(2), self.factor * -(-_QUERY_CHUNK // self.factor)
        # The last queries are those of the last key.
        offset = keys - -(-queries // self.factor)
        for start in range(0, queries, chunk):
            end = min(start + chunk, queries)
            oldest = 0 if self.width is None else max(0, start // self.factor + offset + 1 - self.width)
            newest = offset - (-end // self.factor) if self.causal else keys
            yield slice(start, end), slice(oldest, newest)

    def _weights(self, q3: Tensor, k3: Tensor, rows: slice, outer: torch.Size) -> tuple[Tensor, Tensor]:
        """The attention weights (B * N, rows, S) of a chunk, before dropout, and those of its sinks, if it has any."""
        scores = torch.bmm(q3, k3.transpose(1, 2))
        if self.causal:
            count, keys = scores.shape[1:]
            # As many keys as rows of queries.
            last = -(-count // self.factor)
            hidden = torch.full((last, last), -torch.inf, dtype=scores.dtype, device=scores.device)
            scores[..., keys - last :] += self._by_query(hidden.triu(1), count)
            if self.width is not None:
                scores[..., :last] += self._by_query(hidden.tril(keys - last - self.width), count)
        elif self.bias is not None:
            bias = self.bias if self.bias.size(-2) == 1 else self.bias[..., rows, :]
            scores.unflatten(0, outer).add_(bias)
        keys = scores.size(-1)
        if self.sinks_N is not None:
            sinks_BN11 = self.sinks_N.to(scores.dtype)[..., None, None].expand(*outer, 1, 1).flatten(0, 1)
            scores = torch.cat([scores, sinks_BN11.expand(-1, scores.size(1), -1)], dim=-1)
        weights, sunk = scores.softmax(-1).tensor_split([keys], dim=-1)
        return weights, sunk

    def _by_query(self, bias_RS: Tensor, queries: int) -> Tensor:
        """Of every row's queries, what is of the row."""
        return bias_RS.repeat_interleave(self.factor, 0)[:queries] if self.factor > 1 else bias_RS


def zeros_like(sinks_N: Tensor | None) -> Tensor | None:
    """Where the gradient of sinks is added up, if there are any."""
    return None if sinks_N is None else torch.zeros_like(sinks_N)


class Attended(torch.autograd.Function):
    """An attention with a backward of its own, and the projection after it if there is one, keeping the inputs alone.

    ``attention.forward`` gives (B, T, N * H) of the inputs. ``attention.backward`` takes the gradient of that, the
    inputs, and whether to compute it ``again``: it gives that or None, the gradients of the inputs, and of its sinks.
    """

    @staticmethod
    def forward(ctx, attention: Any, weight_OI: Tensor | None, bias_O: Tensor | None, sinks_N, *inputs: Tensor):
        # The sinks are those of the attention: autograd sees them here.
        ctx.attention, ctx.has_bias = attention, bias_O is not None
        ctx.save_for_backward(weight_OI, *inputs)
        with torch.autocast("cpu", enabled=False):
            attended = attention.forward(*inputs)
        return attended if weight_OI is None else F.linear(attended, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weight_OI, *inputs = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            grad_attended = grad if weight_OI is None else (grad @ weight_OI.to(grad.dtype)).to(inputs[0].dtype)
            attended, grads, grad_sinks_N = ctx.attention.backward(grad_attended, *inputs, again=weight_OI is not None)
            own = (None, None) if attended is None else weight_gradients(grad, attended, ctx.has_bias)
        return None, *own, grad_sinks_N, *grads


@dataclass(frozen=True)
class _Heads:
    """A ``ChunkedAttention`` for ``Attended``, on queries, keys and values (B, N, T, H), or on one tensor of all."""

    attention: ChunkedAttention
    heads: int

    def parts(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values, (B, N, T, H) each."""
        return split_qkv(inputs[0], self.heads) if len(inputs) == 1 else inputs

    def forward(self, *inputs: Tensor) -> Tensor:
        return merge_heads(self.attention.forward(*self.parts(*inputs)))

    def backward(
        self, grad_BTD: Tensor, *inputs: Tensor, again: bool
    ) -> tuple[Tensor | None, Sequence[Tensor], Tensor | None]:
        grad_sinks_N, out_BTD = zeros_like(self.attention.sinks_N), torch.empty_like(grad_BTD) if again else None
        out = None if out_BTD is None else split_heads(out_BTD, self.heads)
        q, k, v = self.parts(*inputs)
        grads: Sequence[Tensor] = self.attention.backward(split_heads(grad_BTD, self.heads), q, k, v, out, grad_sinks_N)
        if len(inputs) == 1:
            grad_qkv = torch.empty_like(inputs[0])
            for into, own in zip(self.parts(grad_qkv), grads):
                into.copy_(own)
            grads = (grad_qkv,)
        return out_BTD, grads, grad_sinks_N


def split_qkv(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3 * N * H) -> queries, keys and values, (B, N, T, H) each."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def split_heads(x_BTD: Tensor, heads: int) -> Tensor:
    """(B, T, N * H) -> (B, N, T, H)."""
    return x_BTD.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x_BNTH: Tensor) -> Tensor:
    """(B, N, T, H) -> (B, T, N * H)."""
    return x_BNTH.transpose(1, 2).flatten(2)


def self_attention_linear(
    qkv: Tensor, heads: int, out: nn.Linear, dropout: float, recompute: bool, sinks_N: Tensor | None = None
) -> Tensor:
    """``out(merge_heads(attend(*split_qkv(qkv, heads), causal=True)))``, its naive twin.

    (B, T, 3 * N * H) -> (B, T, D).
    On a CPU, with ``recompute``, neither the scores nor what ``out`` reads are kept for backward.
    """
    if recompute and qkv.device.type == "cpu" and saves() and plain(out):
        masks = DropoutMasks(dropout) if dropout > 0.0 else None
        attention = _Heads(ChunkedAttention(None, True, masks, sinks_N=sinks_N), heads)
        return Attended.apply(attention, out.weight, out.bias, sinks_N, qkv)
    q, k, v = split_qkv(qkv, heads)
    y_BNTH = attend(q, k, v, causal=True, dropout=dropout, recompute=recompute, sinks_N=sinks_N)
    return out(merge_heads(y_BNTH))
