"""Memory and forward time of one layer at several scales against the length of the text (Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from fairseq.dataclass import FairseqDataclass

from fairseq_ms.analysis import report, training_step
from fairseq_ms.analysis.memory.layers import Sizes, full_layers
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.core.layers import LayerConfig, TransformerLayer
from fairseq_ms.lm.config import layer_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = (1, 4, 16, 64)


class Point(TypedDict):
    """One layer at a scale of a text: bytes kept, by formula and measured, and the time of its forward pass."""

    tokens: int
    scale: int
    formula: float
    measured: int
    seconds: float


def sweep(cfg: FairseqDataclass, sizes: Sizes, lengths: Sequence[int], cpu: bool = False) -> list[Point]:
    """Bytes that one layer keeps, by formula and measured, and its forward time, by length and scale."""
    layer = TransformerLayer(LayerConfig(**layer_settings(cfg))).train()
    if torch.cuda.is_available() and not cpu:
        layer.cuda()
    device = next(layer.parameters()).device
    points: list[Point] = []
    for length in lengths:
        for scale in SCALES:
            positions = max(1, length // scale)
            x = torch.randn(sizes.batch, positions, sizes.dim, device=device, requires_grad=True)
            kept = full_layers(replace(sizes, checkpoint=False), scale, 1, positions)
            points.append(
                {
                    "tokens": length,
                    "scale": scale,
                    "formula": sum(kept.values()),
                    "measured": saved_bytes(partial(layer, x), layer),
                    "seconds": training_step.forward_seconds(layer, x),
                }
            )
    return points


def draw(figure: Figure, points: Sequence[Point]) -> None:
    """Measured memory on the left, forward time on the right, one line a scale."""
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
