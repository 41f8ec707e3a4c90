"""Losses from the logs of fairseq-train over updates, hours or sizes of a layer (HAED, Figures 2 to 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.analysis import report
from fairseq_ms.analysis.arguments import split_label
from fairseq_ms.analysis.plot import training_log
from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {"updates": "updates", "hours": "hours of training"}


@dataclass(frozen=True)
class Curve:
    """A run: its label, and its points in the order of updates."""

    label: str
    points: list[training_log.Point]

    def best(self, metric: str) -> float:
        """The lowest value of a metric."""
        return training_log.best(self.points, metric)

    def xy(self, over: str, metric: str) -> tuple[list[float], list[float]]:
        """The points that have the metric."""
        found = [(getattr(point, over), point.values[metric]) for point in self.points if metric in point.values]
        return [x for x, _ in found], [y for _, y in found]


def load(text: str, subset: str) -> Curve:
    """A curve from LABEL=LOG[,LOG ...], the label being the last log's folder by default.

    Logs behind one another are phases of one training: the last is drawn, later by the hours of those before it.
    """
    label, names = split_label(text)
    *earlier, last = [Path(name) for name in ([names] if Path(names).is_file() else names.split(","))]
    points = training_log.read(last, subset)
    before = sum(training_log.read(path, "train")[-1].hours for path in earlier)
    if names == text:
        label = last.resolve().parent.name
    return Curve(label, [replace(point, hours=before + point.hours) for point in points])


def numbers(curves: Sequence[Curve]) -> list[float | None]:
    """The labels as numbers, None where a label is none; UsageError where none is."""
    found: list[float | None] = []
    for curve in curves:
        try:
            found.append(float(curve.label))
        except ValueError:
            found.append(None)
    if not any(number is not None for number in found):
        raise UsageError("--over label needs labels that are numbers, as in 256=LOG")
    return found


def rows(curves: Sequence[Curve], metric: str) -> list[list[object]]:
    """The table's rows: how far each run came, and its values."""
    return [
        [
            curve.label,
            int(curve.points[-1].updates),
            round(curve.points[-1].hours, 4),
            curve.best(metric),
            curve.points[-1].values.get(metric),
        ]
        for curve in curves
    ]


def as_json(curves: Sequence[Curve], metric: str) -> list[dict[str, object]]:
    """Every curve's points."""
    return [
        {
            "label": curve.label,
            "updates": curve.xy("updates", metric)[0],
            "hours": curve.xy("hours", metric)[0],
            # JSON has no nan.
            metric: [value if math.isfinite(value) else None for value in curve.xy("updates", metric)[1]],
        }
        for curve in curves
    ]


def draw(figure: Figure, curves: Sequence[Curve], over: str, metric: str, subset: str) -> None:
    """One panel, a line a run; over labels, a line through all numbers, and a level for a label that is none."""
    axes = figure.subplots()
    if over == "label":
        _draw_sizes(axes, curves, metric)
    else:
        for index, curve in enumerate(curves):
            xs, ys = curve.xy(over, metric)
            line = report.plot_line(axes, index, xs, ys, curve.label)
            # Ten marks a line, however many points it has.
            line.set_markevery(max(1, len(xs) // 10))
    xlabel = "label" if over == "label" else AXES[over]
    report.finish_axes(axes, xlabel, f"{subset} {metric}")


def _draw_sizes(axes: Axes, curves: Sequence[Curve], metric: str) -> None:
    sizes = numbers(curves)
    found = sorted((size, curve.best(metric)) for size, curve in zip(sizes, curves) if size is not None)
    report.plot_line(axes, 0, [size for size, _ in found], [value for _, value in found], "best of each run")
    for index, curve in enumerate(curve for size, curve in zip(sizes, curves) if size is None):
        dashes = report.DASHES[(index + 1) % len(report.DASHES)]
        axes.axhline(curve.best(metric), label=curve.label, linestyle=dashes, linewidth=1.3, color="black")
