"""Softmax attention over ``scaled_dot_product_attention``, and self-attention with a cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_ms.modules.linear import Linear
from fairseq_ms.modules.norm import norm_linear
from fairseq_ms.modules.recompute import draw_seed, scaled_mask
from fairseq_ms.modules.state import KeyValueCache

# Queries whose scores the CPU's dropout attention has in memory at a time.
_QUERY_CHUNK = 128


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
        return _SeededDropoutAttention.apply(q_BNTH, k_BNSH, v_BNSH, bias, causal, dropout, draw_seed())
    queries, keys = q_BNTH.size(2), k_BNSH.size(2)
    if causal and queries == 1:
        causal = False
    if causal and queries != keys:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q_BNTH.device)
        causal, bias = False, ones.tril_(keys - queries)
    return F.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=bias, dropout_p=dropout, is_causal=causal)


class _SeededDropoutAttention(torch.autograd.Function):
    """Attention with dropout on its weights that keeps q, k, v, the output and one number a row.

    The backward pass computes the scores of a chunk of queries once more and draws its dropout mask
    again from the seed, so no score matrix outlives its chunk.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, causal, p, seed):  # type: ignore[no-untyped-def]
        # Laid out (B, T, N, H), so that merging the heads afterwards copies nothing.
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        log_sums = torch.empty(*q.shape[:-1], 1, dtype=q.dtype)
        for number, (rows, visible) in enumerate(_chunks(q, k, causal)):
            scores = _scores(q[:, :, rows], k[:, :, :visible], bias, rows, causal)
            log_sums[:, :, rows] = scores.logsumexp(-1, keepdim=True)
            weights = scores.sub_(log_sums[:, :, rows]).exp_()
            weights.mul_(scaled_mask(seed + number, weights.shape, p, weights))
            out[:, :, rows] = weights @ v[:, :, :visible]
        ctx.causal, ctx.p, ctx.seed = causal, p, seed
        ctx.save_for_backward(q, k, v, bias, out, log_sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, bias, out, log_sums = ctx.saved_tensors
        scale = 1.0 / math.sqrt(q.size(-1))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for number, (rows, visible) in enumerate(_chunks(q, k, ctx.causal)):
            q_rows, k_seen, v_seen, grad_rows = (
                q[:, :, rows],
                k[:, :, :visible],
                v[:, :, :visible],
                grad[:, :, rows],
            )
            weights = _scores(q_rows, k_seen, bias, rows, ctx.causal).sub_(log_sums[:, :, rows]).exp_()
            mask = scaled_mask(ctx.seed + number, weights.shape, ctx.p, weights)
            grad_weights = (grad_rows @ v_seen.transpose(-1, -2)).mul_(mask)
            grad_v[:, :, :visible] += mask.mul_(weights).transpose(-1, -2) @ grad_rows
            row_sums = (grad_rows * out[:, :, rows]).sum(-1, keepdim=True)
            grad_scores = grad_weights.sub_(row_sums).mul_(weights).mul_(scale)
            grad_q[:, :, rows] = grad_scores @ k_seen
            grad_k[:, :, :visible] += grad_scores.transpose(-1, -2) @ q_rows
        return grad_q, grad_k, grad_v, None, None, None, None


def _chunks(q: Tensor, k: Tensor, causal: bool) -> list[tuple[slice, int]]:
    """Slices of queries, each with the number of leading keys its last query can see."""
    queries, keys = q.size(2), k.size(2)
    chunks = []
    for start in range(0, queries, _QUERY_CHUNK):
        end = min(start + _QUERY_CHUNK, queries)
        chunks.append((slice(start, end), end + keys - queries if causal else keys))
    return chunks


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, rows: slice, causal: bool) -> Tensor:
    """Scaled and masked scores of a chunk of queries, (B, N, rows, S)."""
    scores = (q * (1.0 / math.sqrt(q.size(-1)))) @ k.transpose(-1, -2)
    if causal:
        count, keys = scores.shape[-2:]
        hidden = torch.ones(count, count, dtype=torch.bool).triu_(1)
        scores[..., keys - count :].masked_fill_(hidden, -torch.inf)
    elif bias is not None:
        scores += bias if bias.size(-2) == 1 else bias[..., rows, :]
    return scores


def split_heads(x_BTD: Tensor, heads: int) -> Tensor:
    """(B, T, N * H) -> (B, N, T, H)."""
    return x_BTD.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x_BNTH: Tensor) -> Tensor:
    """(B, N, T, H) -> (B, T, N * H)."""
    return x_BNTH.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Causal multi-head self-attention over all positions, queries, keys and values in one projection.

    Args:
        dim: model dimension D, a multiple of ``heads``
        heads: number of heads N
        dropout: probability of dropping an attention weight
        recompute: compute the layer norm before the projection again in backward, and on a CPU the scores
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, recompute: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.recompute = recompute
        self.qkv = Linear(dim, 3 * dim)
        self.out = Linear(dim, dim)

    def new_cache(self, batch_size: int, capacity: int, like: Tensor) -> KeyValueCache:
        """An empty cache of keys and values, of the type and on the device of ``like``."""
        return KeyValueCache(batch_size, self.heads, self.qkv.in_features // self.heads, capacity, like)

    def forward(
        self,
        x_BTD: Tensor,
        norm: nn.LayerNorm | None = None,
        mask: None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend from every position to itself and all before it, those in ``cache`` included.

        ``norm`` is applied to the input first. The keys and values of x are appended to the cache.
        """
        qkv = norm_linear(x_BTD, norm, self.qkv, self.recompute)
        # (B, T, 3 * N * H) -> 3 of (B, N, T, H)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k, v = cache.append(k, v)
        dropout = self.dropout if self.training else 0.0
        y_BNTH = attend(q, k, v, causal=True, dropout=dropout, recompute=self.recompute)
        return self.out(merge_heads(y_BNTH))
