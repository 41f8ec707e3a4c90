"""Losses of training runs over updates, hours or sizes, from fairseq's logs (HAED, Figures 2 to 4)."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import report
from fairseq_ms.tools.arguments import add_choice, add_flag, add_outputs, split_label

# `DATE TIME | INFO | SUBSET | STATISTICS`, where fairseq-ms train has `TIME,MS`, and hydra's
# `[DATE TIME,MS][SUBSET][INFO] - STATISTICS`.
_TIME = r"\d+-\d+-\d+ \d+:\d+:\d+"
LINE = re.compile(
    rf"^(?:(?P<fairseq_time>{_TIME})(?:,\d+)? \| INFO \| (?P<fairseq>[\w.]+) \| |"
    rf"\[(?P<hydra_time>{_TIME})[^]]*\]\[(?P<hydra>[\w.]+)\]\[INFO\] - )(?P<rest>.*)$"
)
# Every start of a run prints its configuration before anything else.
START = "{'_name': None"
# Statistics of `--log-format simple`: `loss=8.7, ppl=412` within an epoch, `loss 8.7 | ppl 412` at its end.
PAIR = re.compile(r"(?:^|[|,:] ?|\s)(\w+)(?:=| +)(-?\d[\d.eE+-]*|nan|inf)(?=$|[,|\s])")


class Point(NamedTuple):
    """One line of a log: updates, hours of training over all starts of the run, and the other statistics by name."""

    updates: float
    hours: float
    values: dict[str, float]


class Curve(NamedTuple):
    """A run: its label, and the values of a metric with the updates and hours at which they were measured."""

    label: str
    updates: list[float]
    hours: list[float]
    values: list[float]

    @property
    def size(self) -> float | None:
        """The label as a number, None where it is none."""
        try:
            return float(self.label)
        except ValueError:
            return None

    @property
    def best(self) -> float:
        """The lowest value, nan where none is finite."""
        return min(filter(math.isfinite, self.values), default=math.nan)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "what fairseq-train printed, or a train.log; logs after a comma are later phases of the same training"
    parser.add_argument("logs", nargs="+", metavar="[LABEL=]LOG[,LOG ...]", help=help)
    what = "label: the best of each run against its label, a number such as units of a layer"
    add_choice(parser, "--over", ("updates", "hours", "label"), what)
    add_flag(parser, "--gen-subset", "--subset", default="valid", help="train, or a validation split (default: valid)")
    parser.add_argument("--metric", default="loss", help="statistic of the log; loss is in bits (default: loss)")
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    """Print how far each run came, and draw its losses."""
    metric = args.metric
    loaded = [load(text, args.gen_subset, metric) for text in args.logs]
    if args.over == "label" and all(curve.size is None for curve in loaded):
        raise UsageError("--over label needs labels that are numbers, as in 256=LOG")
    rows, runs = [], []
    for curve in loaded:
        rows.append([curve.label, int(curve.updates[-1]), round(curve.hours[-1], 4), curve.best, curve.values[-1]])
        # JSON has no nan.
        values = [value if math.isfinite(value) else None for value in curve.values]
        runs.append({"label": curve.label, "updates": curve.updates, "hours": curve.hours, metric: values})
    print(f"{metric} on {args.gen_subset}")
    print(report.format_table(["run", "updates", "hours", "best", "last"], rows))
    write = partial(draw, curves=loaded, over=args.over, name=f"{args.gen_subset} {metric}")
    report.write_outputs(args, {"runs": runs}, write)


def read(path: Path, subset: str) -> list[Point]:
    """The points of a subset, "train" or the name of a validation split, in the order of updates.

    A run that was interrupted and went on repeats updates; the later lines count, and the times add up. Times are those
    at which lines were printed, since fairseq's own "wall" stays 0 in a run that goes on. UsageError where the log has
    no point of the subset.
    """
    wanted = ("train", "train_inner") if subset == "train" else (subset,)
    points: dict[float, Point] = {}
    start = now = None
    earlier = 0.0
    for time, name, rest in _lines(path):
        if start is None or now is None:
            start = time
        elif name == "fairseq_cli.train" and rest.startswith(START):
            earlier += (now - start).total_seconds()
            start = time
        now = time
        values = _statistics(rest, name) if name in wanted else {}
        if "num_updates" in values:
            hours = (earlier + (now - start).total_seconds()) / 3600
            points[values["num_updates"]] = Point(values["num_updates"], hours, values)
    if not points:
        raise UsageError(f"{path} has no line about {subset!r}: it must be what fairseq-train printed, or a train.log")
    return [points[key] for key in sorted(points)]


def _lines(path: Path) -> Iterator[tuple[datetime, str, str]]:
    """Time, subset (or module) and text of each line that fairseq has logged."""
    if not path.is_file():
        raise UsageError(f"there is no log {path}")
    with path.open(encoding="utf-8", errors="replace") as file:
        for found in filter(None, map(LINE.match, file)):
            time = datetime.fromisoformat(found["fairseq_time"] or found["hydra_time"])
            yield time, found["fairseq"] or found["hydra"], found["rest"]


def _statistics(text: str, name: str) -> dict[str, float]:
    """Numbers by name, without the subset's name in front of them."""
    if not text.startswith("{"):
        return {key: float(value) for key, value in PAIR.findall(text)}
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        # A line that a killed run did not finish.
        return {}
    values = {}
    for key, value in record.items():
        with contextlib.suppress(TypeError, ValueError):
            values[key.removeprefix(f"{name}_")] = float(value)
    return values


def load(text: str, subset: str, metric: str) -> Curve:
    """A curve from LABEL=LOG[,LOG ...], the label being the last log's folder by default.

    Consecutive logs are phases of one training: the last is drawn, later by the hours of those before it. Raises
    UsageError where no point has the metric.
    """
    label, names = split_label(text)
    *earlier, last = [Path(name) for name in ([names] if Path(names).is_file() else names.split(","))]
    every = read(last, subset)
    points = [point for point in every if metric in point.values]
    if not points:
        known = ", ".join(sorted({key for point in every for key in point.values}))
        raise UsageError(f"--metric must be one of {known}: got {metric}")
    before = sum(read(path, "train")[-1].hours for path in earlier)
    return Curve(
        last.resolve().parent.name if names == text else label,
        [point.updates for point in points],
        [before + point.hours for point in points],
        [point.values[metric] for point in points],
    )


def draw(figure: report.Figure, curves: Sequence[Curve], over: str, name: str) -> None:
    """A line a run over "updates" or "hours".

    Over "label", a line through the best of each run over the number that its label is, and a level for a label that is
    none.
    """
    axes = figure.subplots()
    if over == "label":
        found = sorted((curve.size, curve.best) for curve in curves if curve.size is not None)
        axes.plot(*zip(*found), label="best of each run")
        for curve, dashes in zip((curve for curve in curves if curve.size is None), itertools.cycle(report.DASHES[1:])):
            axes.axhline(curve.best, label=curve.label, linestyle=dashes, color="black")
    else:
        for curve in curves:
            # Ten marks a line, however many points it has.
            marks = max(1, len(curve.values) // 10)
            axes.plot(getattr(curve, over), curve.values, label=curve.label, markevery=marks)
    report.finish_axes(axes, "hours of training" if over == "hours" else over, name)
