"""What fairseq-train and fairseq-hydra-train print while they train: losses by update and time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fairseq_ms.errors import UsageError

# `DATE TIME | INFO | SUBSET | STATISTICS`, and hydra's `[DATE TIME,MS][SUBSET][INFO] - STATISTICS`.
_TIME = r"\d+-\d+-\d+ \d+:\d+:\d+"
LINE = re.compile(
    rf"^(?:(?P<fairseq_time>{_TIME}) \| INFO \| (?P<fairseq>[\w.]+) \| |"
    rf"\[(?P<hydra_time>{_TIME})[^]]*\]\[(?P<hydra>[\w.]+)\]\[INFO\] - )(?P<rest>.*)$"
)
# Every start of a run prints its configuration before anything else.
START = "{'_name': None"
# Statistics of `--log-format simple`: `loss=8.7, ppl=412` within an epoch, `loss 8.7 | ppl 412` at its end.
PAIR = re.compile(r"(?:^|[|,:] ?|\s)(\w+)(?:=| +)(-?\d[\d.eE+-]*|nan|inf)(?=$|[,|\s])")


@dataclass(frozen=True)
class Point:
    """One line of a log.

    Attributes:
        updates: how many the model had seen
        hours: of training, validation and saving included, over all starts of the run
        values: the other statistics by name, such as "loss" (in bits) and "ppl"
    """

    updates: float
    hours: float
    values: dict[str, float]


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
        raise UsageError(f"{path} has no line about {subset!r}: it must be what fairseq-train printed")
    return [points[key] for key in sorted(points)]


def _lines(path: Path) -> Iterator[tuple[datetime, str, str]]:
    """Time, subset (or module) and text of each line that fairseq has logged."""
    if not path.is_file():
        raise UsageError(f"there is no log {path}")
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            found = LINE.match(line.rstrip("\n"))
            if found:
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
        try:
            values[key.removeprefix(f"{name}_")] = float(value)
        except (TypeError, ValueError):
            continue
    return values


def best(points: Sequence[Point], metric: str) -> float:
    """The lowest value, nan where none is finite; UsageError where no point has the metric."""
    values = [point.values[metric] for point in points if metric in point.values]
    if not values:
        known = ", ".join(sorted({key for point in points for key in point.values}))
        raise UsageError(f"--metric must be one of {known}: got {metric}")
    return min(filter(math.isfinite, values), default=math.nan)
