"""Memory and forward time of one layer at several scales against the length of the text (Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from fairseq.dataclass import FairseqDataclass

from fairseq_ms.analysis import report, training_step
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.core.layers import LayerConfig, TransformerLayer
from fairseq_ms.lm.config import layer_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = (1, 4, 16, 64)


class Point(TypedDict):
    """One layer at a scale of a text: bytes that it keeps, and the time of its forward pass."""

    tokens: int
    scale: int
    measured: int
    seconds: float


def sweep(cfg: FairseqDataclass, batch: int, lengths: Sequence[int], device: torch.device) -> list[Point]:
    """Bytes that one layer of full attention keeps and its forward time, by length and scale."""
    settings = replace(LayerConfig(**layer_settings(cfg)), checkpoint=False)
    layer = TransformerLayer(settings).train().to(device)
    points: list[Point] = []
    for length in lengths:
        for scale in SCALES:
            x = torch.randn(batch, max(1, length // scale), settings.dim, device=device, requires_grad=True)
            forward = partial(layer, x)
            kept, seconds = saved_bytes(forward, layer), training_step.shortest(forward, device, repeats=5)
            points.append({"tokens": length, "scale": scale, "measured": kept, "seconds": seconds})
    return points


def draw(figure: Figure, points: Sequence[Point]) -> None:
    """Memory on the left, forward time on the right, one line a scale."""
    memory, time = figure.subplots(1, 2)
    for index, scale in enumerate(SCALES):
        own = [point for point in points if point["scale"] == scale]
        lengths = [point["tokens"] for point in own]
        report.plot_line(memory, index, lengths, [point["measured"] / 1e6 for point in own], f"{scale}x")
        report.plot_line(time, index, lengths, [point["seconds"] * 1e3 for point in own], f"{scale}x")
    for axes in (memory, time):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    report.finish_axes(memory, "tokens", "kept for backward by one layer (MB)")
    report.finish_axes(time, "tokens", "forward pass of one layer (ms)")
