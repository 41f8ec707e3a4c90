"""The scales of a model, from what users write: ``1x=0:8,4x=8:256`` or ``4x=8,1x=12``, in any order.

Only what the core cannot know is refused here: text of another form, and what it says of overlaps and of heads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fairseq_ms.core.scales import Scale
from fairseq_ms.errors import UsageError

# The scales of a model, finest first; each factor divides the next.
Scales = tuple[Scale, ...]

_COUNTS = re.compile(r"(\d+)x=(0*[1-9]\d*)"), "SCALEx=N with N of at least 1, such as 4x=8,1x=12"
_WINDOWS = re.compile(r"(\d+)x=(\d+):(\d+)"), "SCALEx=near:far, such as 1x=0:8,4x=8:256"


def _items(flag: str, text: str, form: tuple[re.Pattern[str], str]) -> list[list[int]]:
    """The numbers of every comma separated item, finest scale first; UsageError for an item of another form."""
    found = [(item.strip(), form[0].fullmatch(item.strip())) for item in text.split(",")]
    for item, match in found:
        if match is None:
            raise UsageError(f"{flag} must be a comma separated list of {form[1]}: got {item!r} in {text!r}")
    return sorted(list(map(int, match.groups())) for _, match in found if match)


def layer_scales(layers: str) -> Scales:
    """The scales of ``--scale-layers``: ``"4x=8,1x=12"``; raises UsageError for text of another form."""
    return tuple(Scale(factor, count) for factor, count in _items("--scale-layers", layers, _COUNTS))


def window_scales(windows: str, overlap: bool = False) -> Scales:
    """The scales of ``--scale-windows``: ``"1x=0:8,4x=8:256"``.

    Each window begins where the finer one ends and reaches farther; with ``overlap`` it may begin earlier. Raises
    UsageError for text of another form, an overlap or a gap.
    """
    flag, reached = "--scale-windows", 0
    spans = _items(flag, windows, _WINDOWS)
    for factor, near, far in spans:
        rule = "must leave no gap" if near > reached else "must reach farther at coarser scales"
        if near < reached and not overlap:
            rule = "must not overlap (--window-overlap allow permits it)"
        elif near <= reached < far:
            reached = far
            continue
        raise UsageError(f"{flag} {rule}: got {factor}x={near}:{far} after windows that end at {reached}")
    return tuple(Scale(factor, near=near, far=far) for factor, near, far in spans)


def with_heads(scales: Sequence[Scale], heads: str | None) -> Scales:
    """The scales with the heads of ``--scale-heads``, such as ``"4x=8,16x=4"``, or None to share them.

    Raises UsageError for text of another form, and for heads of other scales.
    """
    if heads is None:
        return tuple(scales)
    counts = _items("--scale-heads", heads, _COUNTS)
    if [factor for factor, _ in counts] != [scale.factor for scale in scales]:
        names = ", ".join(map(str, scales))
        raise UsageError(f"--scale-heads must name the scales that have heads, {names}: got {heads!r}")
    return tuple(replace(scale, heads=count) for scale, (_, count) in zip(scales, counts))
