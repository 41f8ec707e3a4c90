"""Softmax attention by torch's kernels, and the reshaping of queries, keys and values for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.recompute import DropoutMasks, checkpointed, saves

# Queries whose scores are in memory at a time, where dropout needs the scores; they fit a core's cache.
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
    ``sinks_N``, (N,) or broadcasting to (B, N, T), are scores of one more key, which all queries see and whose value is
    zero.
    With dropout, torch keeps all score matrices on a CPU: there, with ``recompute``, some queries at a time are
    attended for and their scores computed again in backward.
    """
    assert not (causal and bias is not None)
    sinks = sinks_N.unsqueeze(1) if sinks_N is not None and sinks_N.dim() == 1 else sinks_N
    queries, keys = q_BNTH.size(2), k_BNSH.size(2)
    if dropout > 0.0 and recompute and q_BNTH.device.type == "cpu" and saves():
        return _attend_in_chunks(q_BNTH, k_BNSH, v_BNSH, bias, causal, DropoutMasks(dropout), sinks)
    if queries == 1:
        causal = False
        if sinks is not None and not dropout:
            # Not by a key in front of the others, which would copy a cache.
            return _weighted_sum(q_BNTH, k_BNSH, v_BNSH, bias, False, None, 0, sinks)
    if sinks is not None:
        return _attend_with_sinks(q_BNTH, k_BNSH, v_BNSH, bias, causal, dropout, sinks)
    if causal and queries != keys:
        causal, bias = False, _causal_mask(q_BNTH, k_BNSH)
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=bias, dropout_p=dropout, is_causal=causal)


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Which keys each query sees if they are all up to its own, the queries being the last of the keys: (T, S)."""
    queries, keys = q.size(2), k.size(2)
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)


def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float, sinks_BNT: Tensor
) -> Tensor:
    """``attend`` by torch's kernels, for which the sink is a key in front of the others."""
    (queries, width), keys = q.shape[2:], k.size(2)
    # Eight more channels, so that they stay aligned. In the first of them, queries have the score of the sink, which is
    # 1 there; other keys are 0.
    scores = (sinks_BNT.to(q.dtype) * width**0.5).unsqueeze(-1)
    q = F.pad(q, (0, 8)) + F.pad(scores, (width, 7))
    k, v = F.pad(k, (0, 8, 1, 0)), F.pad(v, (0, 8, 1, 0))
    k = k + F.pad(k.new_ones(1, 1), (width, 7, 0, keys))
    square = False
    if causal and queries == keys:  # a query in front, so that the others see their own keys and the sink
        q, square = F.pad(q, (0, 0, 1, 0)), True
    elif causal:
        bias = F.pad(_causal_mask(q, k[:, :, 1:]), (1, 0), value=True)
    elif bias is not None:
        bias = F.pad(bias, (1, 0), value=1.0 if bias.dtype == torch.bool else 0.0)
    scale = width**-0.5
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=square, scale=scale)
    return y[:, :, int(square) :, :width]


def _attend_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, masks: DropoutMasks, sinks: Tensor | None
) -> Tensor:
    """``attend`` for some queries at a time, each under a checkpoint of its own: no scores are kept for backward."""
    queries, keys, chunks = q.size(2), k.size(2), []
    for start in range(0, queries, _QUERY_CHUNK):
        rows = slice(start, min(start + _QUERY_CHUNK, queries))
        seen = slice(keys - queries + rows.stop if causal else keys)
        of_rows = bias if bias is None or bias.size(-2) == 1 else bias[..., rows, :]
        sunk = sinks if sinks is None or sinks.size(-1) == 1 else sinks[..., rows]
        own = q[:, :, rows], k[:, :, seen], v[:, :, seen], of_rows, causal, masks, start, sunk
        chunks.append(checkpointed(_weighted_sum, *own))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)


def _weighted_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    masks: DropoutMasks | None,
    index: int,
    sinks_BNT: Tensor | None,
) -> Tensor:
    """``attend`` by the formula, with the dropout mask number ``index`` if there are masks."""
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
    if masks is None:
        return weights @ v
    return (weights * masks.keep(weights, index)) @ v * (1.0 / masks.keep_prob)


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
