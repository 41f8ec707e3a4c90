"""Softmax attention by torch's kernels, and the reshaping of queries, keys and values for it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.recompute import checkpointed, draw_mask, hookable, ours

# Queries in a chunk, whose scores are in memory at a time; they fit a core's cache.
_QUERY_CHUNK = 64


def attend(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    recompute: bool = True,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(H) + bias) v, (B, N, T, H).

    Keys and values may have K heads, each shared by N / K consecutive query heads. ``bias`` is additive and broadcasts
    to (B, N, T, S), or to (B, K, 1, S) for one query; every row must have a finite entry. ``causal`` lets query t see
    keys 0 .. t + S - T (the queries are the last of the keys) and excludes a bias. ``sinks_N``, (N,) or broadcasting to
    (B, N, T), are scores of one more key, which all queries see and whose value is zero.
    On a CPU, torch keeps all scores for backward if there is dropout; with ``recompute``, queries are taken in chunks,
    whose scores are computed again.
    """
    assert not (causal and bias is not None)
    sinks = sinks_N.unsqueeze(1) if sinks_N is not None and sinks_N.dim() == 1 else sinks_N
    queries, keys = q_BNTH.size(2), k_BKSH.size(2)
    if queries == 1 and not dropout:
        # The query heads of a group become queries of their key head, so that no cache is repeated.
        shared = k_BKSH.size(1), q_BNTH.size(1) // k_BKSH.size(1)
        q_BKGH = q_BNTH.unflatten(1, shared).squeeze(3)
        if sinks is None:
            y_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKSH, v_BKSH, attn_mask=bias)
        else:
            sinks_KG = sinks.unflatten(-2, shared).squeeze(-1)
            y_BKGH = _weighted_sum(q_BKGH, k_BKSH, v_BKSH, bias, False, 0.0, sinks_KG)
        return y_BKGH.flatten(1, 2).unsqueeze(2)
    if dropout > 0.0 and recompute and q_BNTH.device.type == "cpu" and ours():
        return _attend_in_chunks(q_BNTH, k_BKSH, v_BKSH, bias, causal, dropout, sinks)
    if sinks is not None:
        return _attend_with_sinks(q_BNTH, k_BKSH, v_BKSH, bias, causal, dropout, sinks)
    if causal and queries != keys:
        causal, bias = False, _causal_mask(q_BNTH, k_BKSH)
    return _fused(q_BNTH, k_BKSH, v_BKSH, bias, dropout, causal)


def visible(queries: Tensor, blocks: Tensor, factor: Any, nearest: Any, end: Any) -> Tensor:
    """Whether queries at positions (..., T, 1) see blocks number (..., 1, S) of ``factor`` tokens.

    They see those whose first token is ``nearest`` to ``end - 1`` tokens before; numbers or tensors that broadcast.
    """
    distance = queries - blocks * factor
    return (distance >= nearest) & (distance < end)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float | None = None
) -> Tensor:
    """torch's attention; key heads are repeated for their query heads where its kernels cannot share them."""
    shared = q.size(1) != k.size(1)
    if shared and not _kernels_share(q.device, q.dtype, q.size(3), bias is not None):
        k, v, shared = _repeated(k, q), _repeated(v, q), False
    more: dict[str, bool] = {"enable_gqa": True} if shared else {}
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scale, **more
    )


def _repeated(x_BKSH: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, K, S, H), repeated for each query head, (B, N, S, H)."""
    group = q.size(1) // x_BKSH.size(1)
    return x_BKSH.repeat_interleave(group, 1) if group > 1 else x_BKSH


@functools.cache
def _shares(device: torch.device, dtype: torch.dtype, width: int, masked: bool) -> bool:
    # With hooks of its own, since a checkpoint would count what is saved here; ``torch.func`` has none.
    own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), own if hookable() else torch._C._DisableFuncTorch():
        q, k = (torch.zeros(1, heads, 16, width, dtype=dtype, device=device, requires_grad=True) for heads in (2, 1))
        bias = torch.zeros(16, 16, dtype=dtype, device=device) if masked else None
        y = F.scaled_dot_product_attention(q, k, k, attn_mask=bias, is_causal=not masked, enable_gqa=True)
    return y.grad_fn is not None and "Attention" in y.grad_fn.name()


def _kernels_share(device: torch.device, dtype: torch.dtype, width: int, masked: bool) -> bool:
    """Whether torch has a kernel for shared key heads there; without one, it would keep all scores."""
    return _shares(device, dtype, width, masked)


# What torch.compiler.assume_constant_result sets, which would load the compiler with every import of the core.
_kernels_share._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """The causal mask (T, S) of queries that are the last T of S keys; True where a key is seen."""
    queries, keys = q.size(2), k.size(2)
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)


def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float, sinks_BNT: Tensor
) -> Tensor:
    """``attend`` by torch's kernels, with the sink as one more key in front."""
    (queries, width), keys = q.shape[2:], k.size(2)
    # In one more channel, the sink is 1, queries are its score, and other keys are 0; seven more keep them aligned.
    scores = (sinks_BNT.to(q.dtype) * width**0.5).unsqueeze(-1)
    q = F.pad(q, (0, 8)) + F.pad(scores, (width, 7))
    k, v = F.pad(k, (0, 8, 1, 0)), F.pad(v, (0, 8, 1, 0))
    k = k + F.pad(k.new_ones(1, 1), (width, 7, 0, keys))
    square = False
    if causal and queries == keys:  # one more query in front, so that the mask stays square
        q, square = F.pad(q, (0, 0, 1, 0)), True
    elif causal:
        bias = F.pad(_causal_mask(q, k[:, :, 1:]), (1, 0), value=True)
    elif bias is not None:
        bias = F.pad(bias, (1, 0), value=1.0 if bias.dtype == torch.bool else 0.0)
    y = _fused(q, k, v, bias, dropout, square, width**-0.5)
    return y[:, :, int(square) :, :width]


def _attend_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float, sinks: Tensor | None
) -> Tensor:
    """``attend`` for chunks of queries, each under a checkpoint, so that no scores are kept for backward."""
    queries, keys, chunks = q.size(2), k.size(2), []
    for start in range(0, queries, _QUERY_CHUNK):
        rows = slice(start, min(start + _QUERY_CHUNK, queries))
        seen = slice(keys - queries + rows.stop if causal else keys)
        own_bias = bias if bias is None or bias.size(-2) == 1 else bias[..., rows, :]
        own_sinks = sinks if sinks is None or sinks.size(-1) == 1 else sinks[..., rows]
        own = q[:, :, rows], k[:, :, seen], v[:, :, seen], own_bias, causal, dropout, own_sinks
        chunks.append(checkpointed(_weighted_sum, *own))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)


def _weighted_sum(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float, sinks_BNT: Tensor | None
) -> Tensor:
    """``attend`` by the formula."""
    k, v = _repeated(k, q), _repeated(v, q)
    scores = (q * q.size(-1) ** -0.5) @ k.transpose(2, 3)
    if causal:
        scores = scores.masked_fill_(~_causal_mask(q, k), -torch.inf)
    elif bias is not None:
        scores = scores + bias
    if sinks_BNT is not None:
        sunk = sinks_BNT.to(scores.dtype).unsqueeze(-1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sunk], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights * draw_mask(dropout, weights) if dropout else weights) @ v


def split_qkv(qkv: Tensor, heads: int, key_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, (N + 2 K) * H) -> queries (B, N, T, H), keys and values (B, K, T, H) each; K is N if not given."""
    counts = heads, key_heads or heads, key_heads or heads
    width = qkv.size(-1) // sum(counts)
    q, k, v = (split_heads(x, n) for x, n in zip(qkv.split([n * width for n in counts], dim=-1), counts))
    return q, k, v


def split_kv(kv: Tensor, heads: int) -> Tensor:
    """Keys beside values, (B, S, 2 * K * H) -> (2, B, K, S, H)."""
    return kv.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)


def split_heads(x_BTD: Tensor, heads: int) -> Tensor:
    """(B, T, N * H) -> (B, N, T, H)."""
    return x_BTD.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x_BNTH: Tensor) -> Tensor:
    """(B, N, T, H) -> (B, T, N * H)."""
    return x_BNTH.transpose(1, 2).flatten(2)
