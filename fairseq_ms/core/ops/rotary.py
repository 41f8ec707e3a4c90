"""Rotary positions: queries and keys are rotated by their positions, so that scores depend on distances alone.

Channels i and i + H / 2 of a head are the coordinates of a point. At position p it is rotated by the angle
p * base ** (-2 i / H), so that the product of a query and a key depends on the difference of their positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: range | Tensor, head_dim: int, base: float, like: Tensor) -> Tensor:
    """cos and sin of the angles at positions (T,) or (B, T), for heads of H channels: (2, [B,] T, H / 2).

    Angles are computed in double precision, since float32 would be off by 0.04 at position 10 ** 6. The result is
    float32, or of the type of ``like`` if that is wider, on its device.
    """
    pairs_F = _numbers(range(0, head_dim, 2), like)
    positions_T = _numbers(positions, like) if isinstance(positions, range) else positions
    angles_TF = positions_T.unsqueeze(-1) * base ** (-pairs_F / head_dim)
    return torch.stack([angles_TF.cos(), angles_TF.sin()]).to(torch.promote_types(like.dtype, torch.float32))


def beginnings(start: int | Tensor, count: int, factor: int = 1) -> range | Tensor:
    """The first positions of the blocks of k tokens that end among ``count`` tokens from position ``start`` on.

    For a position in a tensor (1,), of a single token, the first position of its block, finished or not.
    """
    if isinstance(start, Tensor):
        return start if factor == 1 else start // factor * factor
    return range(start // factor * factor, (start + count) // factor * factor, factor)


def _numbers(numbers: range, like: Tensor) -> Tensor:
    return torch.arange(numbers.start, numbers.stop, numbers.step, dtype=torch.float64, device=like.device)


def rotate(x: Tensor, rotation_2TF: Tensor | None, heads: int) -> Tensor:
    """Rotate the first ``heads`` heads of x (B, T, O) by a ``rotation`` of its T positions, and leave the rest.

    Only the rotation is kept for backward.
    """
    if rotation_2TF is None:
        return x
    cos_TF, sin_TF = rotation_2TF
    width = 2 * cos_TF.size(-1)
    # (T, F) -> (T, 1, F), the same for every head
    cos, sin = cos_TF.to(x.dtype).unsqueeze(-2), sin_TF.to(x.dtype).unsqueeze(-2)
    # (B, T, N * H) -> two of (B, T, N, F), and what is left as it is
    turned, rest = x.split([heads * width, x.size(-1) - heads * width], dim=-1)
    first, second = turned.unflatten(-1, (heads, 2, width // 2)).unbind(-2)
    both = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat([torch.stack(both, dim=-2).flatten(-3), rest], dim=-1)
