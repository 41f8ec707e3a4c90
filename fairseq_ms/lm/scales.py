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
_WINDOWS = re.compile(r"(\d+)x=(\d+):(\d*)(?:\*(0*[1-9]\d*))?"), "SCALEx=near:far*HEADS, such as 1x=0:8*2,4x=8:*4"


def _items(flag: str, text: str, form: tuple[re.Pattern[str], str]) -> list[tuple[str, ...]]:
    """The numbers of every comma separated item, finest scale first; UsageError for an item of another form."""
    found = [(item.strip(), form[0].fullmatch(item.strip())) for item in text.split(",")]
    for item, match in found:
        if match is None:
            raise UsageError(f"{flag} must be a comma separated list of {form[1]}: got {item!r} in {text!r}")
    return sorted((match.groups("") for _, match in found if match), key=lambda numbers: int(numbers[0]))


def layer_scales(layers: str) -> Scales:
    """The scales of ``--scale-layers``: ``"4x=8,1x=12"``; raises UsageError for text of another form."""
    return tuple(Scale(int(factor), int(count)) for factor, count in _items("--scale-layers", layers, _COUNTS))


def window_scales(windows: str, heads: str | None = None, overlap: bool = False) -> tuple[Scales, ...]:
    """The scales of ``--scale-windows``, ``"1x=0:8,4x=8:256"``, or of several that take turns, ``"1x=0:8|1x=0:"``.

    Windows of one scale stay in their order. Their heads follow a ``*``, or are those of ``--scale-heads``. A coarser
    scale begins where the closed windows of finer ones end; with ``overlap`` it may begin earlier. Raises UsageError
    for text of another form, an overlap, and heads in both flags.
    """
    turns, flag = [], "--scale-windows"
    for turn in windows.split("|"):
        spans = [
            (int(k), int(near), int(far) if far else None, own) for k, near, far, own in _items(flag, turn, _WINDOWS)
        ]
        scales = [Scale(k, near=near, far=far, heads=int(own or 0)) for k, near, far, own in spans]
        for scale in scales:
            reached = max((finer.far or 0 for finer in scales if finer.factor < scale.factor), default=0)
            if scale.near < reached and not overlap:
                rule = "must not overlap (--window-overlap allow permits it)"
                raise UsageError(f"{flag} {rule}: got {scale.window} after windows that end at {reached}")
        if heads and any(scale.heads for scale in scales):
            raise UsageError(f"--scale-heads must not be given where {flag} has heads, {windows}: got {heads!r}")
        turns.append(with_heads(scales, heads))
    return tuple(turns)


def with_heads(scales: Sequence[Scale], heads: str | None) -> Scales:
    """The scales with the heads of ``--scale-heads``, such as ``"4x=8,16x=4"``, or None to share them.

    Raises UsageError for text of another form, and for heads of other scales.
    """
    if not heads:
        return tuple(scales)
    counts = [(int(factor), int(count)) for factor, count in _items("--scale-heads", heads, _COUNTS)]
    if [factor for factor, _ in counts] != [scale.factor for scale in scales]:
        names = ", ".join(map(str, scales))
        raise UsageError(f"--scale-heads must name the scales that have heads, {names}: got {heads!r}")
    return tuple(replace(scale, heads=count) for scale, (_, count) in zip(scales, counts))
