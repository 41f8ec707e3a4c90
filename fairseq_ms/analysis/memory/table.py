"""Bytes by part of a model and by purpose, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fairseq_ms.analysis import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GB = 1e9

# Part -> purpose -> bytes.
Parts = Mapping[str, Mapping[str, float]]


def total(parts: Parts) -> float:
    """All bytes."""
    return sum(sum(purposes.values()) for purposes in parts.values())


def purposes_of(parts: Parts) -> list[str]:
    """The purposes for which any part has bytes."""
    return list(dict.fromkeys(name for purposes in parts.values() for name, value in purposes.items() if value))


def format_parts(parts: Parts, extra: Mapping[str, float], with_total: bool = True) -> str:
    """A row for each part in GB (1e9 bytes), then further lines and the total."""
    shown = purposes_of(parts)
    rows: list[list[object]] = [
        [part, *(purposes.get(name, 0.0) / GB for name in shown), sum(purposes.values()) / GB]
        for part, purposes in parts.items()
    ]
    further = {**extra, **({"total": total(parts) + sum(extra.values())} if with_total else {})}
    rows += [[name, *[None] * len(shown), value / GB] for name, value in further.items()]
    return report.format_table(["part", *shown, "total (GB)"], rows)


def as_json(parts: Parts) -> list[dict[str, object]]:
    """The rows in bytes."""
    return [{"part": part, "total": sum(purposes.values()), **purposes} for part, purposes in parts.items()]


def draw(figure: Figure, parts: Parts) -> None:
    """One stacked bar for each part, purposes told apart by hatching."""
    axes = figure.add_subplot()
    bottoms = [0.0] * len(parts)
    for index, name in enumerate(purposes_of(parts)):
        heights = [purposes.get(name, 0.0) / GB for purposes in parts.values()]
        bars = axes.bar(range(len(parts)), heights, bottom=bottoms, label=name, edgecolor="black", linewidth=0.5)
        for bar in bars:
            bar.set(hatch=report.HATCHES[index % len(report.HATCHES)], alpha=0.75)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    axes.set_xticks(range(len(parts)), [part.replace(" ", "\n") for part in parts])
    report.finish_axes(axes, "", "memory (GB)", beside=True)
