"""The scales of a model and the windows through which heads see them, and their rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

from torch import Tensor

from fairseq_ms.core.ops.attention import visible


@dataclass(frozen=True)
class Scale:
    """One scale of a model, or a window through which some heads see it.

    Attributes:
        factor: tokens of a position of this scale, a block, k
        layers: transformer layers at this scale (0 in models that do not count layers by scale)
        near, far: the window in tokens: a block is seen iff it is finished and near <= distance of its first token
            < far; None is an open end
        heads: attention heads of this scale or window; with 0 for all, they share the model's heads evenly
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
        """The window as ``--scale-windows`` spells it."""
        return f"{self.factor}x={self.near}:{'' if self.far is None else self.far}"

    def visible(self, queries: Tensor, blocks: Tensor) -> Tensor:
        """Whether queries at positions (..., T, 1) see blocks number (..., 1, S)."""
        return visible(queries, blocks, *self.bounds)

    @property
    def bounds(self) -> tuple[int, int, int]:
        """For ``ops.attention.visible``: tokens of a block, nearest, and end, 2**62 if open.

        A block is finished at its last token, k - 1 after its first.
        """
        return self.factor, max(self.near, self.factor - 1), 2**62 if self.far is None else self.far

    def most_blocks(self, length: int) -> int:
        """Blocks that a KV cache holds: all of so many tokens in an open window, all up to ``far`` in a closed one."""
        return -(-length // self.factor) if self.far is None else self.far // self.factor


def check_layers(scales: Sequence[Scale], finest: bool = True) -> None:
    """``check_scales`` for a model that counts layers by scale and has no windows."""
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
    """The scales with their heads: the model's are shared evenly, unless every scale names its own.

    Raises ValueError for heads that cannot be shared evenly or do not add up.
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
    """The windows of one layer after the other, with their heads, given a tuple of scales or of such tuples.

    Several windows may share a factor. Raises ValueError for windows that leave a gap or cut blocks, for heads that do
    not add up, and for more tuples than layers.
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
    # Finer ones first. A finer window may not begin where a coarser one ends: a block counts by its first token, so
    # up to k - 1 tokens there would be in none.
    reached = 0
    for scale in sorted(scales, key=attrgetter("factor", "near")):
        if scale.near > reached:
            raise ValueError(f"scales must leave no gap: got {scale.window} after windows that end at {reached}")
        reached = max(reached, 2**62 if scale.far is None else scale.far)
    return share_heads(scales, heads)


def check_window(scale: Scale, name: str) -> None:
    """Raise ValueError, about ``name``, for a window without blocks, or with bounds within a block."""
    k, near, far = scale.factor, scale.near, scale.far
    if not all(isinstance(n, int) for n in (near, far or 0)) or near < 0 or (far is not None and near >= far):
        raise ValueError(f"{name} must be near:far with 0 <= near < far: got {scale.window}")
    if k > 1 and (near < k or near % k or (far is not None and far % k)):
        near = max(k, (near + k // 2) // k * k)
        far = None if far is None else max(near + k, (far + k // 2) // k * k)
        rule = f"be multiples of {k} for {scale}, near at least {k}, since blocks are seen when they are finished"
        nearest = replace(scale, near=near, far=far).window
        raise ValueError(f"{name} must {rule} (nearest: {nearest}): got {scale.window}")
