"""The scales of a model: how many tokens a position stands for, what there is of it, and how it is pooled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.cache import Rows
from fairseq_ms.core.ops.attention import attend
from fairseq_ms.core.ops.linear import projection

DOWNSAMPLERS = ("avg", "max", "conv")


@dataclass(frozen=True)
class Scale:
    """One scale of a model, or what some heads see of it through a window.

    Attributes:
        factor: how many tokens a position of this scale stands for, k
        layers: transformer layers at this scale (0 where a model does not count layers by scale)
        near, far: the attention window in tokens: a block is seen iff near <= distance of its first token < far and it
            is finished; None is an open end
        heads: attention heads at this scale or of this window (0 at all that share them: evenly)
    """

    factor: int
    layers: int = 0
    near: int = 0
    far: int | None = None
    heads: int = 0

    def __str__(self) -> str:
        return f"{self.factor}x"

    @property
    def window(self) -> str:
        """As ``--scale-windows`` has it."""
        return f"{self.factor}x={self.near}:{'' if self.far is None else self.far}"

    def visible(self, queries: Tensor, blocks: Tensor) -> Tensor:
        """Whether queries (..., J, 1) see blocks (..., 1, S), both tensors of integers: finished and in the window."""
        return visible(queries, blocks, *self.bounds)

    @property
    def bounds(self) -> tuple[int, int, int]:
        """The factor, and the distances of the first tokens of blocks that are seen: from one up to another."""
        return self.factor, max(self.near, self.factor - 1), 2**62 if self.far is None else self.far

    def first_visible(self, query: int) -> int:
        """The oldest block in a query's window; below 0 if the window reaches before the text."""
        return 0 if self.far is None else (query - self.far) // self.factor + 1

    def see(
        self,
        q_BNTH: Tensor,
        k_BNCH: Tensor,
        v_BNCH: Tensor,
        start: int = 0,
        oldest: int = 0,
        dropout: float = 0.0,
        recompute: bool = False,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """What queries at positions from ``start`` on see of the blocks from ``oldest`` on, (B, N, T, H).

        It is zero where that is nothing, as for all queries before the first that sees a block.
        """
        length, device, nearest = q_BNTH.size(2), q_BNTH.device, self.bounds[1]
        blind = max(oldest * self.factor + nearest - start, 0)
        if blind >= length:
            # Zeros that still lead back to the queries: distributed training waits for every gradient.
            return F.pad(q_BNTH[:, :, :0], (0, 0, length, 0))
        first, end = max(oldest, self.first_visible(start + blind)), (start + length - 1 - nearest) // self.factor + 1
        k, v, bias = k_BNCH[:, :, first - oldest : end - oldest], v_BNCH[:, :, first - oldest : end - oldest], None
        if length > 1:
            queries = torch.arange(start + blind, start + length, device=device)[:, None]
            seen = self.visible(queries, torch.arange(first, end, device=device))
            bias = q_BNTH.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        y_BNTH = attend(q_BNTH[:, :, blind:], k, v, bias, False, dropout, recompute, sinks_N)
        return F.pad(y_BNTH, (0, 0, blind, 0)) if blind else y_BNTH

    def most_blocks(self, length: int) -> int:
        """How many blocks a query of a text of so many tokens can see: those from ``far`` on are out of sight."""
        return -(-length // self.factor) if self.far is None else self.far // self.factor


def visible(queries: Tensor, blocks: Tensor, factor: Any, nearest: Any, end: Any) -> Tensor:
    """``Scale.visible``, for the ``bounds`` of several scales too, as tensors."""
    distance = queries - blocks * factor
    return (distance >= nearest) & (distance < end)


def check_layers(scales: Sequence[Scale], finest: bool = True) -> None:
    """``check_scales`` of a model that counts layers by scale and has no windows."""
    check_scales(scales, finest)
    for scale in scales:
        if scale.layers < 1:
            raise ValueError(f"Scale.layers must be at least 1 for each: got {scale.layers} for {scale}")
        if scale.near or scale.far is not None:
            raise ValueError(f"Scale.near and far must be left out, since no scale has a window: got {scale.window}")


def check_scales(scales: Sequence[Scale], finest: bool = True) -> None:
    """Raise ValueError unless the scales ascend, each divides the next, and the first is 1x (if ``finest``)."""
    factors = [scale.factor for scale in scales]
    names = ", ".join(str(scale) for scale in scales)
    if not factors or factors[0] < 1 or (finest and factors[0] != 1):
        raise ValueError(f"scales must begin with {'1x' if finest else 'a positive factor'}: got {names or 'none'}")
    for fine, coarse in pairwise(factors):
        if coarse <= fine or coarse % fine:
            raise ValueError(f"scales must ascend and divide each other: got {names}")


def share_heads(scales: Sequence[Scale], heads: int) -> list[Scale]:
    """The scales, each with as many of the ``heads`` as the others unless they name their own.

    Raises ValueError for heads that cannot be shared evenly, and for own ones that do not add up.
    """
    own = [scale.heads for scale in scales]
    if any(own):
        if min(own) < 1 or sum(own) != heads:
            found = ", ".join(map(str, own))
            raise ValueError(f"Scale.heads must be at least 1 each and add up to heads {heads}: got {found}")
        return list(scales)
    each, more = divmod(heads, len(scales))
    if not each:
        raise ValueError(f"heads must be at least {len(scales)}, one for each scale that shares them: got {heads}")
    if more:
        alone = len({scale.factor for scale in scales}) == len(scales)
        names = [f"{scale}=" if alone else f"{scale.window}*" for scale in scales]
        split = ",".join(f"{name}{each + (place < more)}" for place, name in enumerate(names))
        rule = f"heads must be a multiple of {len(scales)}, one for each scale, unless they are split as in {split}"
        raise ValueError(f"{rule}: got {heads}")
    return [replace(scale, heads=each) for scale in scales]


def window_turns(scales: Sequence[Any], heads: int, layers: int) -> list[list[Scale]]:
    """The windows of one layer after the other, with their heads: a tuple of scales, or of such tuples in turns.

    Several windows may share a factor. Raises ValueError for windows that leave a gap or that blocks do not fit, for
    heads that do not add up, and for more turns than layers.
    """
    turns = [list(turn) for turn in ([scales] if not scales or isinstance(scales[0], Scale) else scales)]
    if len(turns) > layers:
        raise ValueError(f"layers must be at least {len(turns)}, since so many scales take turns: got {layers}")
    return [_windows(turn, heads) for turn in turns]


def _windows(scales: list[Scale], heads: int) -> list[Scale]:
    check_scales([next(same) for _, same in groupby(scales, attrgetter("factor"))])
    for scale in scales:
        check_window(scale, "scales")
        if scale.layers:
            raise ValueError(f"Scale.layers must be left out, since all layers have all windows: got {scale.layers}")
    reached = 0
    for scale in sorted(scales, key=attrgetter("factor", "near")):
        if scale.near > reached:
            raise ValueError(f"scales must leave no gap: got {scale.window} after windows that end at {reached}")
        # Nothing is missing where a finer window is open.
        reached = max(reached, 2**62 if scale.far is None else scale.far)
    return share_heads(scales, heads)


def check_window(scale: Scale, name: str) -> None:
    """Raise ValueError for a window of no blocks, or with bounds within some; its sentence is on ``name``."""
    k, near, far = scale.factor, scale.near, scale.far
    if not all(isinstance(n, int) for n in (near, far or 0)) or near < 0 or (far is not None and near >= far):
        raise ValueError(f"{name} must be near:far with 0 <= near < far: got {scale.window}")
    if k > 1 and (near < k or near % k or (far is not None and far % k)):
        near = max(k, (near + k // 2) // k * k)
        far = None if far is None else max(near + k, (far + k // 2) // k * k)
        rule = f"be multiples of {k} for {scale}, near at least {k}, since blocks are seen when they are finished"
        nearest = replace(scale, near=near, far=far).window
        raise ValueError(f"{name} must {rule} (nearest: {nearest}): got {scale.window}")


class Downsample(nn.Module):
    """Pools every k consecutive positions into one (Multi-scale Transformer LMs, Section 3.2, Table 4).

    Args:
        kind: "avg" mean, "max" maximum, "conv" convolution with kernel and stride k; raises ValueError for another one
        dim: model dimension D
        factor: k
    """

    def __init__(self, kind: str, dim: int, factor: int) -> None:
        super().__init__()
        if kind not in DOWNSAMPLERS:
            raise ValueError(f"downsampler must be avg, max or conv: got {kind!r}")
        self.kind = kind
        self.factor = factor
        # Kernel and stride being equal, the convolution is one projection of k positions side by side.
        self.conv = projection(factor * dim, dim) if kind == "conv" and factor > 1 else None

    @property
    def padding(self) -> float:
        """What a position before the first token holds: nothing for a sum, never the greatest for a maximum."""
        return -math.inf if self.kind == "max" else 0.0

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, C * k, D) -> (B, C, D)."""
        if self.factor == 1 or not x_BTD.size(1):
            return x_BTD
        blocks = x_BTD.unflatten(1, (x_BTD.size(1) // self.factor, self.factor))  # (B, C, k, D)
        if self.conv is not None:
            return self.conv(blocks.flatten(2))
        return blocks.mean(2) if self.kind == "avg" else blocks.amax(2)


class UnfinishedBlock(Rows):
    """The positions (B, r, D) after the last finished block of k of them, r < k.

    Args:
        batch_size: B
        factor: k
        like_BTD: what positions look like, for their width, type and device
    """

    def __init__(self, batch_size: int, factor: int, like_BTD: Tensor) -> None:
        super().__init__(like_BTD.new_zeros(batch_size, 0, like_BTD.size(-1)))
        self.factor = factor

    def join(self, x_BTD: Tensor) -> Tensor:
        """Put what waits in front of x: (B, r + T, D), from where a block begins; an incomplete one waits again."""
        joined = torch.cat([self.x, x_BTD], dim=1) if self.x.size(1) else x_BTD
        self.x = joined[:, joined.size(1) - joined.size(1) % self.factor :].clone()
        return joined
