"""Attention with relative sinusoidal positions over a segment and the past before it (Dai et al., 2019).

The score of query i for key j is ``(q_i + u) . k_j + (q_i + v) . r_(i-j)``: by content, and by how far the
key lies back. u and v are shared by all layers; r is a projection of the sinusoid of the distance.

The position scores of T queries are one matrix product with the r of all distances, farthest first; row i
needs that matrix from column T - 1 - i on. With one column more than there are keys, moving every row to
its place is only another way of reading the same memory::

    distances  S-1 ... 1 0 -1            row 0   . . a b c d e          a b c d e
    (T = 3 queries, S = 5 keys)          row 1   . f g h i j .    ->    f g h i j  (later keys are hidden)
                                         row 2   k l m n o . .          k l m n o
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_ms.core.ops.attention import split_qkv
from fairseq_ms.core.ops.linear import NORM_KINDS, Norm
from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import DropoutMasks, autocast_dtype, autocast_to


def sinusoids(keys: int, dim: int, like: Tensor) -> Tensor:
    """Sinusoids (keys + 1, D) of the distances keys - 1, ..., 1, 0, -1; all sines first, then all cosines.

    The last row is of no distance that a query sees: it makes ``rel_shift`` a view.
    """
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.arange(keys - 1, -2, -1, dtype=torch.float64, device="cpu")[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]
    return table.to(like)


class Sinusoids:
    """``sinusoids`` of one dimension, computed once and again only for other keys, another type or another device."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.table_PD: Tensor | None = None

    def __call__(self, keys: int, like: Tensor) -> Tensor:
        """Those of ``keys`` keys, (keys + 1, D)."""
        table = self.table_PD
        if table is None or (len(table) - 1, table.dtype, table.device) != (keys, like.dtype, like.device):
            # A tensor made in inference mode could not be trained with later.
            with torch.inference_mode(False):
                table = self.table_PD = sinusoids(keys, self.dim, like)
        return table


def rel_shift(scores: Tensor, keys: int) -> Tensor:
    """Scores (..., T, S + 1) by distance, farthest first, as a view (..., T, S) by key."""
    queries = scores.size(-2)
    flat = scores.flatten(-2)
    return flat[..., queries - 1 : queries - 1 + queries * keys].unflatten(-1, (queries, keys))


def hide_future(scores: Tensor) -> Tensor:
    """In place: -inf where a key (..., T, S) comes after its query, the queries being the last T of the keys."""
    queries, keys = scores.shape[-2:]
    if queries > 1:
        later = torch.ones(queries, queries, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., keys - queries :].masked_fill_(later, -torch.inf)
    return scores


class _ProjectHeads(torch.autograd.Function):
    """Queries of the segment, and keys and values of memory and segment, all in heads-first layout.

    The keys and values are written to where attention reads them, the memory in front, so joining the two
    costs no copy of its own. With a norm both are normalised first, and again in backward instead of being kept.
    Its scale and shift are folded into the projection, so that their gradient needs none of the memory itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        memory_BMD: Tensor,
        weight_OD: Tensor,
        scale_D: Tensor | None,
        shift_D: Tensor | None,
        heads: int,
        norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:
        batch, length, _ = x_BTD.shape
        past, inner = memory_BMD.size(1), weight_OD.size(0) // 3
        kv_NBSH = x_BTD.new_empty(2, heads, batch, past + length, inner // heads)
        weight = weight_OD if scale_D is None else weight_OD * scale_D
        bias = None if shift_D is None else weight_OD @ shift_D
        # (B, T, 3 * N * H) -> (3, N, B, T, H)
        qkv = F.linear(_normalise(x_BTD, norm), weight, bias)
        qkv = qkv.unflatten(-1, (3, heads, -1)).permute(2, 3, 0, 1, 4)
        kv_NBSH[:, :, :, past:] = qkv[1:]
        if past:
            bias = bias[inner:] if bias is not None else None
            of_memory = F.linear(_normalise(memory_BMD, norm), weight[inner:], bias)
            kv_NBSH[:, :, :, :past] = of_memory.unflatten(-1, (2, heads, -1)).permute(2, 3, 0, 1, 4)
        ctx.norm = norm
        ctx.save_for_backward(x_BTD, memory_BMD, weight_OD, scale_D, shift_D)
        return qkv[0].contiguous(), kv_NBSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_kv: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, memory_BMD, weight_OD, scale_D, shift_D = ctx.saved_tensors
        past, inner = memory_BMD.size(1), weight_OD.size(0) // 3
        heads, batch, length, head_dim = grad_q.shape
        # (3, N, B, T, H) -> (B * T, 3 * N * H)
        grad = grad_q.new_empty(batch, length, 3, heads, head_dim)
        grad[:, :, 0] = grad_q.permute(1, 2, 0, 3)
        grad[:, :, 1:] = grad_kv[:, :, :, past:].permute(2, 3, 0, 1, 4)
        rows = grad.view(batch * length, 3 * inner)
        with torch.enable_grad():
            leaf = x_BTD.detach().requires_grad_()
            normed = _normalise(leaf, ctx.norm)
        grad_weight = rows.t() @ normed.detach().flatten(0, 1)
        of_memory = None
        if past:
            of_memory = grad_kv[:, :, :, :past].permute(2, 3, 0, 1, 4).reshape(-1, 2 * inner)
            grad_weight[inner:].addmm_(of_memory.t(), _normalise(memory_BMD, ctx.norm).flatten(0, 1))
        if scale_D is None:
            return (rows @ weight_OD).view_as(x_BTD), None, grad_weight, None, None, None, None
        grad_x = torch.mm(rows, weight_OD).mul_(scale_D).view_as(x_BTD)
        (grad_x,) = torch.autograd.grad(normed, leaf, grad_x)
        grad_scale, grad_shift = (grad_weight * weight_OD).sum(0), None
        grad_weight.mul_(scale_D)
        if shift_D is not None:
            grad_bias = rows.sum(0)
            if of_memory is not None:
                grad_bias[inner:] += of_memory.sum(0)
            grad_shift = grad_bias @ weight_OD
            grad_weight.addr_(grad_bias, shift_D)
        return grad_x, None, grad_weight, grad_scale, grad_shift, None, None


def _normalise(x: Tensor, norm: Norm | None) -> Tensor:
    """``norm(x)`` without scale and shift; x itself without a norm."""
    if norm is None:
        return x
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x, x.shape[-1:], eps=norm.eps)
    return F.layer_norm(x, x.shape[-1:], eps=norm.eps)


class _RelativeAttention(torch.autograd.Function):
    """Attention with position scores that keeps q, k, v and the weights; dropout is kept as a seed."""

    @staticmethod
    def forward(
        ctx: Any, q_NBTH: Tensor, kv_NBSH: Tensor, r_PNH: Tensor, u_NH: Tensor, v_NH: Tensor, p: float
    ) -> Tensor:
        heads, batch, queries, head_dim = q_NBTH.shape
        keys = kv_NBSH.size(3)
        scale = 1.0 / math.sqrt(head_dim)
        k, v = kv_NBSH.flatten(1, 2)
        by_content = (q_NBTH + u_NH[:, None, None]).flatten(0, 1)
        by_distance = _distance_scores(q_NBTH, r_PNH, v_NH)
        shifted = rel_shift(by_distance, keys).flatten(0, 1)
        scores = torch.baddbmm(shifted, by_content, k.transpose(1, 2), beta=scale, alpha=scale)
        weights = hide_future(scores).softmax(-1)
        dropped, ctx.masks = weights, DropoutMasks(p) if p > 0.0 else None
        if ctx.masks is not None:
            dropped = weights * ctx.masks.scaled(weights)
        out = torch.bmm(dropped, v).view(heads, batch, queries, head_dim)
        ctx.scale = scale
        ctx.save_for_backward(q_NBTH, kv_NBSH, r_PNH, u_NH, v_NH, weights)
        # (N, B, T, H) -> (B, T, N * H)
        return out.permute(1, 2, 0, 3).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        q_NBTH, kv_NBSH, r_PNH, u_NH, v_NH, weights = ctx.saved_tensors
        heads, batch, queries, head_dim = q_NBTH.shape
        keys = kv_NBSH.size(3)
        k, v = kv_NBSH.flatten(1, 2)
        grad = grad_BTD.unflatten(-1, (heads, head_dim)).permute(2, 0, 1, 3).reshape(-1, queries, head_dim)
        grad_weights = torch.bmm(grad, v.transpose(1, 2))
        dropped = weights
        if ctx.masks is not None:
            mask = ctx.masks.scaled(weights)
            grad_weights.mul_(mask)
            dropped = mask.mul_(weights)
        grad_kv = torch.empty_like(kv_NBSH)
        torch.bmm(dropped.transpose(1, 2), grad, out=grad_kv[1].flatten(0, 1))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype).mul_(ctx.scale)
        by_content = (q_NBTH + u_NH[:, None, None]).flatten(0, 1)
        torch.bmm(grad_scores.transpose(1, 2), by_content, out=grad_kv[0].flatten(0, 1))
        grad_content = torch.bmm(grad_scores, k).view_as(q_NBTH)
        # The view of rel_shift the other way round: every score goes back to the column of its distance.
        by_distance = q_NBTH.new_zeros(heads, batch, queries, keys + 1)
        rel_shift(by_distance, keys).copy_(grad_scores.view(heads, batch, queries, keys))
        rows = by_distance.view(heads, batch * queries, keys + 1)
        grad_distance = torch.bmm(rows, r_PNH.transpose(0, 1)).view_as(q_NBTH)
        query = (q_NBTH + v_NH[:, None, None]).view(heads, -1, head_dim)
        grad_r = torch.bmm(rows.transpose(1, 2), query).transpose(0, 1)
        grad_u, grad_v = grad_content.sum((1, 2)), grad_distance.sum((1, 2))
        return grad_content.add_(grad_distance), grad_kv, grad_r, grad_u, grad_v, None


def _distance_scores(q_NBTH: Tensor, r_PNH: Tensor, v_NH: Tensor) -> Tensor:
    """(q + v) . r for every distance, (N, B, T, P): one matrix product a head."""
    heads, batch, queries, _ = q_NBTH.shape
    rows = (q_NBTH + v_NH[:, None, None]).flatten(1, 2)
    return torch.bmm(rows, r_PNH.permute(1, 2, 0)).view(heads, batch, queries, -1)


def segment_attention(
    x_BTD: Tensor,
    memory_BMD: Tensor,
    norm: Norm | None,
    qkv: nn.Linear,
    r_PNH: Tensor,
    u_NH: Tensor,
    v_NH: Tensor,
    dropout: float,
    recompute: bool,
) -> Tensor:
    """Attention from a segment to its memory and to itself, by content and distance.

    (B, T, D) and (B, M, D) -> (B, T, N * H).

    No gradient goes to the memory. Queries, keys, values, r and the weights are kept for backward; dropout masks and
    the normalised inputs are not, unless ``recompute`` is False. Its naive twin is ``tests/references/streaming.py``.

    Args:
        x_BTD: the segment
        memory_BMD: the states before it
        norm: applied to both first, if given
        qkv: the projection to queries, keys and values, D -> 3 * N * H without a bias
        r_PNH: projected sinusoids of the distances, farthest first, of one key more than there are
        u_NH: Transformer-XL's u, added to the queries for content
        v_NH: Transformer-XL's v, added to them for position
        dropout: probability of dropping an attention weight
        recompute: False for torch's own backward, which keeps everything
    """
    heads, length = r_PNH.size(1), x_BTD.size(1)
    if (
        torch.compiler.is_compiling()
        or not plain(norm, *NORM_KINDS)
        or not plain(qkv, nn.Linear)
        or (not recompute and torch.is_grad_enabled())
    ):
        states_BSD = torch.cat([memory_BMD, x_BTD], dim=1)
        states_BSD = norm(states_BSD) if norm is not None else states_BSD
        return relative_attention(*heads_of(states_BSD, length, qkv, heads), r_PNH, u_NH, v_NH, dropout)
    dtype = autocast_dtype(x_BTD.device) or x_BTD.dtype
    with autocast_to(x_BTD.device, None):
        q_NBTH, kv_NBSH = _ProjectHeads.apply(
            x_BTD.to(dtype),
            memory_BMD.to(dtype),
            qkv.weight.to(dtype),
            norm.weight.to(dtype) if norm is not None else None,
            norm.bias.to(dtype) if isinstance(norm, nn.LayerNorm) else None,
            heads,
            norm,
        )
        positions = r_PNH.to(dtype), u_NH.to(dtype), v_NH.to(dtype)
        return _RelativeAttention.apply(q_NBTH, kv_NBSH, *positions, dropout)


def relative_attention(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    r_PNH: Tensor,
    u_NH: Tensor,
    v_NH: Tensor,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention by content and distance, with torch's own backward: (B, T, N * H).

    The queries are the last of the keys; r is of at least as many keys as there are. With a ``bias`` of one query,
    (1, 1, 1, S), r is of the distance of each key, and of one more.
    """
    keys = k_BNSH.size(2)
    by_content = (q_BNTH + u_NH[:, None]) @ k_BNSH.transpose(-1, -2)
    by_distance = _distance_scores(q_BNTH.transpose(0, 1), r_PNH[-(keys + 1) :], v_NH).transpose(0, 1)
    scores = (by_content + rel_shift(by_distance, keys)) / math.sqrt(q_BNTH.size(-1))
    scores = scores if bias is None else scores + bias
    weights = F.dropout(hide_future(scores).softmax(-1), dropout, training=True)
    return (weights.to(v_BNSH.dtype) @ v_BNSH).transpose(1, 2).flatten(2)


def heads_of(x_BSD: Tensor, length: int, qkv: nn.Linear, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, N, T, H) of the last T positions, keys and values (B, N, S, H) of all.

    Args:
        qkv: the projection to queries, keys and values, D -> 3 * N * H without a bias
    """
    if plain(qkv, nn.Linear):
        q = queries_of(x_BSD[:, x_BSD.size(1) - length :], qkv.weight, heads)
        return q, *keys_and_values(x_BSD, qkv.weight, heads)
    q, k, v = split_qkv(qkv(x_BSD), heads)
    return q[:, :, q.size(2) - length :], k, v


def queries_of(x_BTD: Tensor, qkv_OD: Tensor, heads: int) -> Tensor:
    """Queries (B, N, T, H) by a projection (3 * N * H, D) to queries, keys and values."""
    return F.linear(x_BTD, qkv_OD[: qkv_OD.size(0) // 3]).unflatten(-1, (heads, -1)).transpose(1, 2)


def keys_and_values(x_BSD: Tensor, qkv_OD: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values (B, N, S, H) by a projection (3 * N * H, D) to queries, keys and values."""
    kv = F.linear(x_BSD, qkv_OD[qkv_OD.size(0) // 3 :])
    k, v = kv.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return k, v
