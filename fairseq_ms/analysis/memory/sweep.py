"""Memory and forward time of one layer at several scales against the length of the text (Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fairseq_ms.analysis import memory_formula, memory_measured, report
from fairseq_ms.analysis.memory_formula import Sizes
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.lm.config import layer_config
from fairseq_ms.modules.transformer import TransformerLayer

SCALES = (1, 4, 16, 64)


def sweep(cfg: Any, sizes: Sizes, lengths: Sequence[int], cpu: bool = False) -> list[dict[str, Any]]:
    """Bytes that one layer keeps, by formula and measured, and its forward time, by length and scale."""
    layer = TransformerLayer(layer_config(cfg)).train()
    if torch.cuda.is_available() and not cpu:
        layer.cuda()
    device = next(layer.parameters()).device
    points = []
    for length in lengths:
        for scale in SCALES:
            positions = max(1, length // scale)
            x = torch.randn(sizes.batch, positions, sizes.dim, device=device, requires_grad=True)
            kept = memory_formula.full_layers(replace(sizes, checkpoint=False), scale, 1, positions)
            points.append(
                {
                    "tokens": length,
                    "scale": scale,
                    "formula": sum(kept.values()),
                    "measured": saved_bytes(lambda x=x: layer(x), layer),
                    "seconds": memory_measured.forward_seconds(layer, x),
                }
            )
    return points


def draw(figure: Any, points: Sequence[dict[str, Any]]) -> None:
    """Measured memory on the left, forward time on the right, one line a scale."""
    memory, time = figure.subplots(1, 2)
    for number, scale in enumerate(SCALES):
        own = [point for point in points if point["scale"] == scale]
        lengths = [point["tokens"] for point in own]
        style = report.line_style(number)
        memory.plot(lengths, [point["measured"] / 1e6 for point in own], label=f"{scale}x", **style)
        time.plot(lengths, [point["seconds"] * 1e3 for point in own], label=f"{scale}x", **style)
    for axes in (memory, time):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    report.finish_axes(memory, "tokens", "kept for backward by one layer (MB)")
    report.finish_axes(time, "tokens", "forward pass of one layer (ms)")
