"""Windows over blocks of k tokens as sliding windows of flash attention, without a mask or a copy of the keys.

Query t = i k + p sees block j iff near <= t - j k < far. Where near = n k and far = f k, that is n <= i - j < f,
whatever the phase p is. So the k phases of a block of queries are k heads that share their keys, and shifted by n
blocks the window is causal and f - n blocks wide::

    k = 2, window 2:6       blocks of keys  0 1 2 3
    i = 0  t = 0, 1                         . . . .     zero
    i = 1  t = 2, 3                         x . . .
    i = 2  t = 4, 5                         x x . .
    i = 3  t = 6, 7                         . x x .
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.window_attention import HeadGroup


def folds(group: HeadGroup) -> bool:
    """Whether a group's window is a sliding window of whole blocks, all of them finished."""
    return group.near % group.factor == group.far % group.factor == 0 and group.near >= group.factor - 1


def folded_window_attention(
    fine: Tensor, coarse: Sequence[Tensor], groups: Sequence[HeadGroup], head_dim: int
) -> Tensor:
    """What ``WindowAttention`` computes, without dropout, of groups that fold: (B, T, D)."""
    widths = [group.heads * head_dim for group in groups]
    *queries, pair = fine.split([*widths, fine.size(-1) - sum(widths)], dim=-1)
    heads = []
    for group, q_BTD, pair_BCD in zip(groups, queries, [pair, *coarse], strict=True):
        k, v = pair_BCD.unflatten(-1, (2, group.heads, head_dim)).unbind(2)
        heads.append(_attend(group, q_BTD.unflatten(-1, (group.heads, head_dim)), k, v).flatten(2))
    return torch.cat(heads, dim=-1)


def _attend(group: HeadGroup, q_BTNH: Tensor, k_BCNH: Tensor, v_BCNH: Tensor) -> Tensor:
    """One group's attention, (B, T, N, H)."""
    factor, length = group.factor, q_BTNH.size(1)
    shift, blocks = group.near // factor, -(-length // factor)
    if blocks <= shift:
        # Zeros that still lead back to all parameters: distributed training waits for every gradient.
        return q_BTNH * 0.0 + k_BCNH[:, :0].sum() + v_BCNH[:, :0].sum()
    # (B, T, N, H) -> (B, I, N * k, H): heads that share their keys lie side by side.
    q = F.pad(q_BTNH[:, shift * factor :], (0, 0, 0, 0, 0, blocks * factor - length))
    q = q.unflatten(1, (-1, factor)).transpose(2, 3).flatten(2, 3)
    seen = blocks - shift
    y = sliding_window(q, k_BCNH[:, :seen], v_BCNH[:, :seen], group.far // factor - shift - 1)
    y = y.unflatten(2, (-1, factor)).transpose(2, 3).flatten(1, 2)
    return F.pad(y, (0, 0, 0, 0, shift * factor, 0))[:, :length]


def sliding_window(q_BIQH: Tensor, k_BINH: Tensor, v_BINH: Tensor, left: int) -> Tensor:
    """Attention from position i to i - left .. i; of Q heads, each Q / N that follow each other share their keys.

    On a GPU, torch's flash attention, in half precision alone; elsewhere, its definition.
    """
    if q_BIQH.is_cuda or q_BIQH.is_meta:
        count = q_BIQH.size(1)
        flash = torch.ops.aten._flash_attention_forward
        y_BIQH: Tensor = flash(
            q_BIQH, k_BINH, v_BINH, None, None, count, count, 0.0, True, False,
            window_size_left=left, window_size_right=0,
        )[0]  # fmt: skip
        return y_BIQH
    at = torch.arange(q_BIQH.size(1))
    distance = at[:, None] - at
    visible = (distance >= 0) & (distance <= left)
    q, k, v = (x.transpose(1, 2) for x in (q_BIQH, k_BINH, v_BINH))
    return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(1, 2)
