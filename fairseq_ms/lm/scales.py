"""Per-scale settings as users write them: ``1x=0:8,4x=8:256`` or ``4x=8,1x=12``, in any order."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from fairseq_ms.errors import UsageError

_ITEM = re.compile(r"(?P<scale>\d+)x=(?P<value>\S+)")


@dataclass(frozen=True)
class Scale:
    """One scale of a model.

    Attributes:
        factor: how many tokens a position of this scale stands for
        layers: transformer layers at this scale (0 where a model does not count layers by scale)
        near, far: the attention window in tokens, near <= distance < far
        heads: attention heads at this scale (0 where a model does not split heads)
    """

    factor: int
    layers: int = 0
    near: int = 0
    far: int = 0
    heads: int = 0

    def __str__(self) -> str:
        return f"{self.factor}x"


def parse_items(flag: str, text: str, need_finest: bool = True) -> dict[int, str]:
    """``"4x=8,1x=12"`` as {1: "12", 4: "8"}, finest scale first.

    Raises UsageError when an item has another form, a scale appears twice, ``1x`` is missing (unless
    ``need_finest`` is False), or a scale does not divide the next.
    """
    values: dict[int, str] = {}
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None or int(match["scale"]) == 0:
            raise UsageError(
                f"{flag} must be a comma separated list of SCALEx=VALUE such as 1x=...,4x=...: got {item.strip()!r}"
            )
        scale = int(match["scale"])
        if scale in values:
            raise UsageError(f"{flag} must name each scale once: got {scale}x twice in {text!r}")
        values[scale] = match["value"]
    if need_finest and 1 not in values:
        raise UsageError(f"{flag} must have an entry for the scale 1x: got {text!r}")
    factors = sorted(values)
    for fine, coarse in itertools.pairwise(factors):
        if coarse % fine:
            raise UsageError(f"{flag} must name scales that divide each other: got {fine}x and {coarse}x in {text!r}")
    return {factor: values[factor] for factor in factors}


def parse_counts(flag: str, text: str, least: int = 1, need_finest: bool = True) -> dict[int, int]:
    """``"4x=8,1x=12"`` as {1: 12, 4: 8}; raises UsageError as ``parse_items`` does and below ``least``."""
    counts = {}
    for factor, value in parse_items(flag, text, need_finest).items():
        if not value.isdecimal() or int(value) < least:
            raise UsageError(f"{flag} must give a whole number of at least {least} for {factor}x: got {value!r}")
        counts[factor] = int(value)
    return counts


def parse_windows(flag: str, text: str, overlap: bool = False) -> dict[int, tuple[int, int]]:
    """``"1x=0:8,4x=8:256"`` as {1: (0, 8), 4: (8, 256)}.

    Each window begins where the finer one ends; with ``overlap`` it may begin earlier, never later, and never
    before k - 1, where blocks of k tokens are finished at every position. Raises UsageError on another form, an
    empty window, an overlap or a gap, and as ``parse_items`` does.
    """
    windows: dict[int, tuple[int, int]] = {}
    reached = 0
    for factor, value in parse_items(flag, text).items():
        match = re.fullmatch(r"(\d+):(\d+)", value)
        if match is None or int(match[1]) >= int(match[2]):
            raise UsageError(f"{flag} must give near:far with near < far for {factor}x: got {value!r}")
        near, far = int(match[1]), int(match[2])
        if near > reached:
            raise UsageError(f"{flag} must leave no gap: {factor}x begins at {near} but finer scales end at {reached}")
        if near < reached and not overlap:
            raise UsageError(
                f"{flag} must not overlap: {factor}x begins at {near} but finer scales reach {reached} "
                "(--window-overlap allow permits it)"
            )
        if near < factor - 1:
            raise UsageError(
                f"{flag} must begin {factor}x at {factor - 1} or farther, because the newest block of {factor} tokens "
                f"may be unfinished and unseen: got {value!r}"
            )
        if far <= reached:
            raise UsageError(
                f"{flag} must reach farther at coarser scales: {factor}x ends at {far}, not past {reached}"
            )
        if far - near < factor:
            raise UsageError(f"{flag} must give {factor}x a window of at least {factor} tokens: got {value!r}")
        windows[factor] = (near, far)
        reached = far
    return windows
