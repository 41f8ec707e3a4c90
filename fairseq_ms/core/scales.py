"""The scales of a model: how many tokens a position stands for, and what there is of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Scale:
    """One scale of a model.

    Attributes:
        factor: how many tokens a position of this scale stands for
        layers: transformer layers at this scale (0 where a model does not count layers by scale)
        near, far: the attention window in tokens, near <= distance < far
        heads: attention heads at this scale (0 at all scales that share them: evenly)
    """

    factor: int
    layers: int = 0
    near: int = 0
    far: int = 0
    heads: int = 0

    def __str__(self) -> str:
        return f"{self.factor}x"


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
        split = ",".join(f"{scale}={each + (place < more)}" for place, scale in enumerate(scales))
        rule = f"heads must be a multiple of {len(scales)}, one for each scale, unless they are split as in {split}"
        raise ValueError(f"{rule}: got {heads}")
    return [replace(scale, heads=each) for scale in scales]
