"""Softmax attention that keeps no scores for backward, and what reshapes queries, keys and values for it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.recompute import draw_seed, keep_mask, keep_prob, mixed_seed, pointwise_linear

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
) -> Tensor:
    """softmax(q k^T / sqrt(H) + bias) v, of shape (B, N, T, H).

    ``bias`` is additive and broadcasts to (B, N, T, S); every row must have a finite entry. ``causal``
    lets query t see keys 0 .. t + S - T (the queries are the last of the keys) and excludes a bias.
    Dropout on a CPU goes through a path of our own, because torch's keeps all score matrices there;
    ``recompute=False`` takes torch's.
    """
    assert not (causal and bias is not None)
    on_cpu = q_BNTH.device.type == "cpu"
    if dropout > 0.0 and recompute and on_cpu and torch.is_grad_enabled():
        with torch.autocast("cpu", enabled=False):
            return _KeepingInputs.apply(ChunkedAttention(bias, causal, dropout), q_BNTH, k_BNSH, v_BNSH)
    queries, keys = q_BNTH.size(2), k_BNSH.size(2)
    if causal and queries == 1:
        causal = False
    if causal and queries != keys:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q_BNTH.device)
        causal, bias = False, ones.tril_(keys - queries)
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=bias, dropout_p=dropout, is_causal=causal)


class ChunkedAttention:
    """Attention that is computed again in backward, so that nothing but its inputs has to be kept.

    Queries are processed in chunks, forward and backward, and no score outlives its chunk. A dropout mask is
    drawn from a seed, the same one in both directions. Several operations here write into what they read, or
    into the float type directly: on a CPU, masking takes longer than multiplying the matrices otherwise.

    Args:
        bias: additive, broadcasts to (B, N, T, S), or None
        causal: as in ``attend``; excludes a bias
        dropout: probability of dropping a weight
        seed: of the dropout masks; a fresh one if not given
        sees_a_key: broadcasts to (B, N, T, 1); where it is False, the result is zero
    """

    def __init__(
        self,
        bias: Tensor | None,
        causal: bool,
        dropout: float,
        seed: int | None = None,
        sees_a_key: Tensor | None = None,
    ) -> None:
        self.bias = bias
        self.causal = causal
        self.dropout = dropout
        self.seed = draw_seed() if seed is None and dropout > 0.0 else seed or 0
        self.sees_a_key = sees_a_key

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """q (B, N, T, H), k and v (B, N, S, H) -> (B, N, T, H), with the heads of a position side by side.

        The result is written into ``out``, if there is one.
        """
        if out is None:
            out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        q3, k3, v3 = self._scaled(q), k.flatten(0, 1), v.flatten(0, 1)
        for index, (rows, visible) in enumerate(self._chunks(q, k)):
            weights = self._weights(q3[:, rows], k3[:, :visible], rows, q.shape[:2])
            if self.dropout > 0.0:
                weights.mul_(self._keep(index, weights))
            out[:, :, rows] = torch.bmm(weights, v3[:, :visible]).unflatten(0, q.shape[:2])
        return out.mul_(1.0 / keep_prob(self.dropout)) if self.dropout > 0.0 else out

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; the result of ``forward`` is written into ``out``, if there is one."""
        scale = 1.0 / math.sqrt(q.size(-1))
        grad3, q3, k3, v3 = grad.flatten(0, 1), self._scaled(q), k.flatten(0, 1), v.flatten(0, 1)
        if self.dropout > 0.0:
            grad3 = grad3 * (1.0 / keep_prob(self.dropout))
        grad_q, grad_k, grad_v = torch.empty_like(q3), torch.empty_like(k3), torch.empty_like(v3)
        # The last chunk first: it sees every key, and overwrites what is in the fresh memory.
        chunks = list(enumerate(self._chunks(q, k)))
        for index, (rows, visible) in reversed(chunks):
            weights = self._weights(q3[:, rows], k3[:, :visible], rows, q.shape[:2])
            grad_weights = torch.bmm(grad3[:, rows], v3[:, :visible].transpose(1, 2))
            dropped = weights
            if self.dropout > 0.0:
                keep = self._keep(index, weights)
                grad_weights.mul_(keep)
                dropped = keep.mul_(weights)
            if out is not None:
                out[:, :, rows] = torch.bmm(dropped, v3[:, :visible]).unflatten(0, q.shape[:2])
            kept = 0.0 if index == len(chunks) - 1 else 1.0
            grad_v[:, :visible].baddbmm_(dropped.transpose(1, 2), grad3[:, rows], beta=kept)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_q[:, rows] = torch.bmm(grad_scores, k3[:, :visible])
            grad_k[:, :visible].baddbmm_(grad_scores.transpose(1, 2), q3[:, rows], beta=kept)
        if out is not None and self.dropout > 0.0:
            out.mul_(1.0 / keep_prob(self.dropout))
        return grad_q.mul_(scale).view(q.shape), grad_k.view(k.shape), grad_v.view(v.shape)

    def _scaled(self, q: Tensor) -> Tensor:
        """The queries (B * N, T, H), divided by sqrt(H)."""
        # Into memory laid out as the product wants it: the heads of q are views into a wider tensor. A product with
        # this memory as its ``out`` would have the layout of q under ``torch.compile``.
        scaled = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return scaled.copy_(q).mul_(1.0 / math.sqrt(q.size(-1))).flatten(0, 1)

    def _chunks(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, int]]:
        """Slices of queries, each with the number of leading keys its last query can see."""
        queries, keys = q.size(2), k.size(2)
        for start in range(0, queries, _QUERY_CHUNK):
            end = min(start + _QUERY_CHUNK, queries)
            yield slice(start, end), end + keys - queries if self.causal else keys

    def _weights(self, q3: Tensor, k3: Tensor, rows: slice, outer: torch.Size) -> Tensor:
        """The attention weights (B * N, rows, S) of a chunk, before dropout."""
        scores = torch.bmm(q3, k3.transpose(1, 2))
        if self.causal:
            count, keys = scores.shape[1:]
            scores[..., keys - count :] += torch.full((count, count), -torch.inf, dtype=scores.dtype).triu_(1)
        elif self.bias is not None:
            bias = self.bias if self.bias.size(-2) == 1 else self.bias[..., rows, :]
            scores.unflatten(0, outer).add_(bias)
        weights = scores.softmax(-1)
        if self.sees_a_key is not None:
            sees_a_key = self.sees_a_key[..., rows, :].to(weights.dtype)
            weights.unflatten(0, outer).mul_(sees_a_key)
        return weights

    def _keep(self, index: int, weights: Tensor) -> Tensor:
        return keep_mask(mixed_seed(self.seed, index), weights.shape, self.dropout, weights)


class _KeepingInputs(torch.autograd.Function):
    """``ChunkedAttention`` to autograd: q, k and v are all that it keeps."""

    @staticmethod
    def forward(ctx, attention: ChunkedAttention, q, k, v):  # type: ignore[no-untyped-def]
        ctx.attention = attention
        ctx.save_for_backward(q, k, v)
        return attention.forward(q, k, v)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, *ctx.attention.backward(grad, *ctx.saved_tensors)


class SelfAttentionOfProjection:
    """Causal self-attention as a function of queries, keys and values in one tensor (B, T, 3 * N * H).

    It is an ``ExplicitBackward``: in front of a projection, neither its result nor its scores are kept.
    """

    def __init__(self, heads: int, dropout: float) -> None:
        self.heads = heads
        self.attention = ChunkedAttention(None, True, dropout)

    def __call__(self, qkv: Tensor) -> Tensor:
        with torch.autocast(qkv.device.type, enabled=False):
            return merge_heads(self.attention.forward(*split_qkv(qkv, self.heads)))

    def backward(self, grad: Tensor, qkv: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        with torch.autocast(qkv.device.type, enabled=False):
            q, k, v = split_qkv(qkv, self.heads)
            out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            grads = self.attention.backward(split_heads(grad.to(qkv.dtype), self.heads), q, k, v, out)
            grad_qkv = torch.empty_like(qkv)
            for into, own in zip(split_qkv(grad_qkv, self.heads), grads):
                into.copy_(own)
        return merge_heads(out), (grad_qkv,)


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


def self_attention_linear(qkv: Tensor, heads: int, out: Linear, dropout: float, recompute: bool) -> Tensor:
    """``out(merge_heads(attend(*split_qkv(qkv, heads), causal=True)))``, its naive twin.

    (B, T, 3 * N * H) -> (B, T, D).
    On a CPU, with ``recompute``, neither the scores nor what ``out`` reads are kept for backward.
    """
    if recompute and qkv.device.type == "cpu" and torch.is_grad_enabled():
        attention = SelfAttentionOfProjection(heads, dropout)
        return pointwise_linear(attention, out.weight, out.bias, qkv)
    q, k, v = split_qkv(qkv, heads)
    return out(merge_heads(attend(q, k, v, causal=True, dropout=dropout, recompute=recompute)))
