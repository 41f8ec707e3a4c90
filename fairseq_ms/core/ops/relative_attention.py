"""Attention with relative sinusoidal positions over a segment and the past before it (Dai et al., 2019).

The score of query i for key j is ``(q_i + u) . k_j + (q_i + v) . r_(i-j)``, by content and by distance; r is a
projection of the sinusoid of the distance.

The scores by distance of T queries are one matrix product with the r of all distances, farthest first; row i needs that
matrix from column T - 1 - i on. With one column more than there are keys, shifting the rows is a view::

    distances  S-1 ... 1 0 -1            row 0   . . a b c d e          a b c d e
    (T = 3 queries, S = 5 keys)          row 1   . f g h i j .    ->    f g h i j  (later keys are hidden)
                                         row 2   k l m n o . .          k l m n o
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.recompute import autocast_to, draw_seed, drop, feed, ours


def sinusoids(keys: int, dim: int, like: Tensor) -> Tensor:
    """Sinusoids (keys + 1, D) of the distances keys - 1, ..., 1, 0, -1; all sines first, then all cosines.

    No query sees the last distance, which makes ``rel_shift`` a view.
    """
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.arange(keys - 1, -2, -1, dtype=torch.float64, device="cpu")[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]
    return table.to(like)


class Sinusoids:
    """``sinusoids`` of one dimension, kept for the next call with as many keys, the same type and device."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.table_PD: Tensor | None = None

    def __call__(self, keys: int, like: Tensor) -> Tensor:
        """``sinusoids`` (keys + 1, D)."""
        table = self.table_PD
        if table is None or (len(table) - 1, table.dtype, table.device) != (keys, like.dtype, like.device):
            # A tensor of inference mode could not be trained with later, and one of torch.export has no numbers.
            with torch.inference_mode(False):
                table = sinusoids(keys, self.dim, like)
            self.table_PD = table if type(table) is Tensor else None
        return table


def rel_shift(scores: Tensor, keys: int) -> Tensor:
    """View scores by distance, farthest first, (..., T, S + 1), as scores by key, (..., T, S)."""
    queries = scores.size(-2)
    flat = scores.flatten(-2)
    return flat[..., queries - 1 : queries - 1 + queries * keys].unflatten(-1, (queries, keys))


def hide_future(scores: Tensor) -> Tensor:
    """Mask scores (..., T, S) of later keys in place with -inf; the queries are the last T of the keys."""
    queries, keys = scores.shape[-2:]
    if queries > 1:
        later = torch.ones(queries, queries, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., keys - queries :].masked_fill_(later, -torch.inf)
    return scores


def relative_attention(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    r_PNH: Tensor,
    u_NH: Tensor,
    v_NH: Tensor,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    recompute: bool = True,
) -> Tensor:
    """Attention by content and distance, (B, T, N * H); the queries are the last of the keys.

    With ``recompute``, only queries, keys, values, r and the weights are kept for backward. Its naive twin is
    ``tests/references/streaming.py``.

    Args:
        r_PNH: projected sinusoids of the distances, farthest first, for at least one key more than there are; with a
            bias, for the distance of each key and one more
        u_NH: bias of queries for scores by content
        v_NH: bias of queries for scores by distance
        dropout: probability of dropping an attention weight
        bias: added to the scores of a single query, (1, 1, 1, S)
        recompute: False also keeps dropout masks and queries with their biases
    """
    (batch, heads, queries, width), keys, dtype = q_BNTH.shape, k_BNSH.size(2), q_BNTH.dtype
    # Heads first, so that scores are shifted without a copy; for one query batch first, as caches are.
    first = (heads, batch) if queries > 1 else (batch, heads)

    def flat(x_NB: Tensor) -> Tensor:
        return (x_NB if queries > 1 else x_NB.transpose(0, 1)).flatten(0, 1)

    def by_content(q: Tensor, u_NH: Tensor) -> Tensor:
        return flat(q + u_NH.to(dtype)[:, None, None])

    def by_distance(q: Tensor, v_NH: Tensor) -> Tensor:
        return (q + v_NH.to(dtype)[:, None, None]).flatten(1, 2)

    with autocast_to(q_BNTH.device, None):
        q, k, v = q_BNTH.transpose(0, 1).contiguous(), flat(k_BNSH.transpose(0, 1)), flat(v_BNSH.transpose(0, 1))
        r_NHP, scale = r_PNH[-(keys + 1) :].to(dtype).permute(1, 2, 0), width**-0.5
        # (N, B * T, P): one matrix product a head
        distance, _ = feed(partial(torch.bmm, mat2=r_NHP), by_distance, q, v_NH, enabled=recompute)
        shifted = flat(rel_shift(distance.unflatten(1, (batch, queries)), keys))
        score = partial(torch.baddbmm, shifted, batch2=k.transpose(1, 2), beta=scale, alpha=scale)
        scores, _ = feed(score, by_content, q, u_NH, enabled=recompute)
        weights = hide_future(scores if bias is None else scores + bias.squeeze(0)).softmax(-1)
        if dropout > 0.0 and recompute and ours():
            y, _ = feed(partial(torch.bmm, mat2=v), partial(drop, p=dropout, seed=draw_seed()), weights)
        else:
            y = torch.bmm(F.dropout(weights, dropout), v)
    y_NBTH = y.unflatten(0, first) if queries > 1 else y.unflatten(0, first).transpose(0, 1)
    return y_NBTH.permute(1, 2, 0, 3).flatten(2)
