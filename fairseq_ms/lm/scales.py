"""The scales of a model, from what users write: ``1x=0:8,4x=8:256`` or ``4x=8,1x=12``, in any order."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from fairseq_ms.core.scales import Scale
from fairseq_ms.errors import UsageError

# The scales of a model, finest first; each factor divides the next.
Scales = tuple[Scale, ...]

_ITEM = re.compile(r"(?P<scale>\d+)x=(?P<value>\S+)")


def layer_scales(layers: str, need_finest: bool = True) -> Scales:
    """The scales of ``--scale-layers``: ``"4x=8,1x=12"``; raises UsageError as ``parse_counts`` does."""
    counts = parse_counts("--scale-layers", layers, need_finest=need_finest)
    return tuple(Scale(factor, count) for factor, count in counts.items())


def single_scale(layers: str) -> Scale:
    """The one scale of ``--scale-layers``, which need not be 1x; raises UsageError on another form."""
    scales = layer_scales(layers, need_finest=False)
    if len(scales) != 1:
        raise UsageError(f"--scale-layers of coarse_lm must have a single scale such as 4x=12: got {layers!r}")
    return scales[0]


def aggregated_scales(layers: str, heads: str | None, total: int) -> Scales:
    """``layer_scales`` whose coarse scales split the ``total`` heads of an aggregation layer.

    ``heads`` is ``--scale-heads``, such as ``"4x=8,16x=4"``, or None to share them. Raises UsageError without a coarse
    scale, and on heads of other scales or of another sum.
    """
    finest, *coarse = layer_scales(layers)
    if not coarse:
        raise UsageError(f"--scale-layers of multiscale_bottomup must have a scale beside 1x: got {layers!r}")
    counts = _heads(heads, total, [scale.factor for scale in coarse], "coarse scales of --scale-layers", layers)
    return finest, *(replace(scale, heads=counts[scale.factor]) for scale in coarse)


def window_scales(windows: str, overlap: bool = False) -> Scales:
    """The scales of ``--scale-windows``: ``"1x=0:8,4x=8:256"``; raises UsageError as ``parse_windows`` does."""
    spans = parse_windows("--scale-windows", windows, overlap)
    return tuple(Scale(factor, near=near, far=far) for factor, (near, far) in spans.items())


def retina_scales(windows: str, heads: str | None, total: int, overlap: bool = False) -> Scales:
    """``window_scales`` that split the ``total`` heads of a layer; ``heads`` and errors as in ``aggregated_scales``."""
    scales = window_scales(windows, overlap)
    counts = _heads(heads, total, [scale.factor for scale in scales], "scales of --scale-windows", windows)
    return tuple(replace(scale, heads=counts[scale.factor]) for scale in scales)


def _heads(given: str | None, total: int, factors: list[int], flag: str, text: str) -> dict[int, int]:
    """The heads of ``--decoder-attention-heads`` by scale, as ``--scale-heads`` splits them; 0 to share them."""
    if given is None:
        return dict.fromkeys(factors, 0)
    counts = parse_counts("--scale-heads", given, need_finest=1 in factors)
    if list(counts) != factors:
        raise UsageError(f"--scale-heads must name the {flag} {text!r}: got {given!r}")
    if sum(counts.values()) != total:
        raise UsageError(f"--scale-heads must add up to --decoder-attention-heads {total}: got {given!r}")
    return counts


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


def parse_counts(flag: str, text: str, need_finest: bool = True) -> dict[int, int]:
    """``"4x=8,1x=12"`` as {1: 12, 4: 8}; raises UsageError as ``parse_items`` does and below 1."""
    counts = {}
    for factor, value in parse_items(flag, text, need_finest).items():
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{flag} must give a whole number of at least 1 for {factor}x: got {value!r}")
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
