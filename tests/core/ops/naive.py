"""Naive twins of the operations in ``fairseq_ms.core.ops``, to read and to test against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attention(
    q_BNTH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    masks: Sequence[Tensor] | None = None,
    share: float = 1.0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(H) + bias) v, query by query, (B, N, T, H); twin of ``attention.attend``.

    ``masks`` (B, N, S), one for each query, keep a share of the weights, as dropout does. With ``causal``, the last
    query is that of the last key. Consecutive query heads share a key head.
    """
    k_BNSH, v_BNSH = (x.repeat_interleave(q_BNTH.size(1) // x.size(1), 1) for x in (k_BNSH, v_BNSH))
    rows = []
    for t in range(q_BNTH.size(2)):
        scores_BNS = (q_BNTH[:, :, t : t + 1] * k_BNSH).sum(-1) / math.sqrt(q_BNTH.size(-1))
        if bias is not None:
            scores_BNS = scores_BNS + bias.expand(*q_BNTH.shape[:3], k_BNSH.size(2))[:, :, t]
        if causal:
            scores_BNS = scores_BNS[..., : t + k_BNSH.size(2) - q_BNTH.size(2) + 1]
        total_BN1 = scores_BNS.exp().sum(-1, keepdim=True) + (0.0 if sinks_N is None else sinks_N.exp().unsqueeze(-1))
        weights_BNS = scores_BNS.exp() / total_BN1
        if masks is not None:
            weights_BNS = weights_BNS * masks[t][..., : weights_BNS.size(-1)] / share
        rows.append((weights_BNS[..., None] * v_BNSH[:, :, : weights_BNS.size(-1)]).sum(2))
    return torch.stack(rows, dim=2)


def window_attention(
    q_BNTH: Tensor,
    k_BNCH: Tensor,
    v_BNCH: Tensor,
    factor: int = 1,
    near: int = 0,
    far: int | None = None,
    mask: Tensor | None = None,
    share: float = 1.0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attention to blocks of k tokens through near:far, (B, N, T, H), zero where a query sees none.

    With all scores (T, C), of which a ``mask`` keeps a share, as dropout does; twin of
    ``window_attention.window_attention`` (Multi-scale Transformer LMs, Section 3.4). Consecutive query heads share a
    key head.
    """
    k_BNCH, v_BNCH = (x.repeat_interleave(q_BNTH.size(1) // x.size(1), 1) for x in (k_BNCH, v_BNCH))
    t_T1 = torch.arange(q_BNTH.size(2), device=q_BNTH.device)[:, None]
    start_C = factor * torch.arange(k_BNCH.size(2), device=q_BNTH.device)
    # The block is finished, and its start lies in the window.
    visible_TC = (start_C + factor - 1 <= t_T1) & (near <= t_T1 - start_C)
    visible_TC &= t_T1 - start_C < (t_T1.max() + 1 if far is None else far)
    weights = (q_BNTH @ k_BNCH.transpose(-1, -2) / math.sqrt(q_BNTH.size(-1))).exp() * visible_TC
    total = weights.sum(-1, keepdim=True).clamp(min=1e-300)
    weights = weights / (total if sinks_N is None else total + sinks_N.exp()[:, None, None])
    if mask is not None:
        weights = weights * mask / share
    return weights @ v_BNCH


def rotate(x_BTO: Tensor, positions: Sequence[int], heads: int, head_dim: int, base: float) -> Tensor:
    """Rotate pairs of channels as complex numbers, by position and head; twin of ``rotary.rotate``."""
    rows = []
    for x_BO, position in zip(x_BTO.unbind(1), positions, strict=True):
        *turned, rest = x_BO.split([head_dim] * heads + [x_BO.size(-1) - heads * head_dim], dim=-1)
        for head, x_BH in enumerate(turned):
            real, imaginary = x_BH.chunk(2, dim=-1)
            speeds_F = x_BH.new_tensor([base ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
            z_BF = torch.complex(real, imaginary) * torch.polar(torch.ones_like(speeds_F), position * speeds_F)
            turned[head] = torch.cat([z_BF.real, z_BF.imag], dim=-1)
        rows.append(torch.cat([*turned, rest], dim=-1))
    return torch.stack(rows, dim=1)


def short_conv(x_BTD: Tensor, weight_ND: Tensor) -> Tensor:
    """Each position plus the N before it times their weights, the nearest times the last; twin of ``ShortConv``."""
    rows = []
    for t, x_BD in enumerate(x_BTD.unbind(1)):
        for distance in range(1, min(t, len(weight_ND)) + 1):
            x_BD = x_BD + weight_ND[-distance] * x_BTD[:, t - distance]
        rows.append(x_BD)
    return torch.stack(rows, dim=1)
