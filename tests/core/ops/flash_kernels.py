"""Stand-ins for torch's flash kernels, which do not run on a CPU: for tests of what surrounds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forward(
    q_BRGH: Tensor, k_BRNH: Tensor, v_BRNH: Tensor, *rest: Any, scale: float, **window: int
) -> tuple[Tensor, ...]:
    """Twin of torch's ``_flash_attention_forward`` for causal windows: the result, logarithms of sums, and a seed."""
    rows, dropout, seed, nothing = (
        q_BRGH.size(1),
        rest[4],
        torch.randint(2**31, (1,), device="cpu"),
        q_BRGH.new_zeros(0),
    )
    assert (*rest[:4], *rest[5:]) == (None, None, rows, rows, True, False)
    scores_BGRS = _windowed_scores(q_BRGH, k_BRNH, scale, **window)
    weights_BGRS = scores_BGRS.softmax(-1) * _kept(scores_BGRS, dropout, seed)
    out_BRGH = (weights_BGRS @ _by_query(q_BRGH, v_BRNH)).transpose(1, 2)
    return out_BRGH, scores_BGRS.logsumexp(-1), seed, nothing, nothing


def backward(
    grad_BRGH: Tensor,
    q_BRGH: Tensor,
    k_BRNH: Tensor,
    v_BRNH: Tensor,
    out_BRGH: Tensor,
    sums_BGR: Tensor,
    *rest: Any,
    scale: float,
    **window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of torch's ``_flash_attention_backward`` for the same: the gradients of q, k and v."""
    rows, group = q_BRGH.size(1), q_BRGH.size(2) // k_BRNH.size(2)
    assert (*rest[:4], rest[5]) == (None, None, rows, rows, True)
    k_BGSH, v_BGSH = _by_query(q_BRGH, k_BRNH), _by_query(q_BRGH, v_BRNH)
    grad_BGRH, q_BGRH = grad_BRGH.transpose(1, 2), q_BRGH.transpose(1, 2)
    weights_BGRS = (_windowed_scores(q_BRGH, k_BRNH, scale, **window) - sums_BGR[..., None]).exp()
    own_BGR1 = (grad_BRGH * out_BRGH).sum(-1).transpose(1, 2)[..., None]
    kept_BGRS = _kept(weights_BGRS, rest[4], rest[6])
    grad_scores_BGRS = weights_BGRS * (kept_BGRS * (grad_BGRH @ v_BGSH.mT) - own_BGR1) * scale
    of_keys = grad_scores_BGRS.mT @ q_BGRH, (kept_BGRS * weights_BGRS).mT @ grad_BGRH
    # A head of keys has the sum of what all that share it have.
    grad_k, grad_v = (x.unflatten(1, (-1, group)).sum(2).transpose(1, 2) for x in of_keys)
    return (grad_scores_BGRS @ k_BGSH).transpose(1, 2), grad_k, grad_v


def _kept(like: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """What dropout multiplies weights by, of one seed the same."""
    if dropout == 0.0:  # compiled models know no generators
        return torch.ones_like(like)
    drawn = torch.rand(like.shape, generator=torch.Generator().manual_seed(int(seed)), device="cpu")
    return (drawn >= dropout).to(like) / (1.0 - dropout)


def _by_query(q_BRGH: Tensor, k_BRNH: Tensor) -> Tensor:
    """Keys or values (B, N, R, H) for every head of the queries, (B, G, R, H)."""
    return k_BRNH.repeat_interleave(q_BRGH.size(2) // k_BRNH.size(2), 2).transpose(1, 2)


def _windowed_scores(
    q_BRGH: Tensor, k_BRNH: Tensor, scale: float, window_size_left: int | None = None, window_size_right: int = 0
) -> Tensor:
    """Row r has those of keys r - left .. r."""
    row_R, left = (
        torch.arange(q_BRGH.size(1), device=q_BRGH.device),
        q_BRGH.size(1) if window_size_left is None else window_size_left,
    )
    distance_RS = row_R[:, None] - row_R
    seen_RS = (-window_size_right <= distance_RS) & (distance_RS <= left)
    return (q_BRGH.transpose(1, 2) @ _by_query(q_BRGH, k_BRNH).mT * scale).masked_fill(~seen_RS, -torch.inf)
