"""Runs the sections of benchmarks: parity first, then interleaved rounds, then medians, spread and ratios."""

from __future__ import annotations

import gc
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, cast

import torch

WARM_UP_ROUNDS = 1


class ParityError(Exception):
    """Two paths that have to agree do not; nothing of their section is measured."""


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        rounds: timed rounds; every contestant runs once in each
        quick: tiny shapes, to see that everything runs; the numbers then mean nothing
        only: keep the contestants whose name contains one of these; the baseline always stays
        clock: "wall", or "cpu" for the time that this process had a processor, on machines that others use as well
        sections: keep the sections whose title contains one of these
        least_seconds: work that takes less is done several times in a round, and the time divided
        vocabulary: number of symbols, where it is not the benchmark's own
        criterion: how our models compute their loss in the benchmarks of training
    """

    rounds: int = 7
    quick: bool = False
    only: Sequence[str] = ()
    clock: str = "wall"
    sections: Sequence[str] = ()
    least_seconds: float = 0.0
    vocabulary: int | None = None
    criterion: str = "cross_entropy"


@dataclass(frozen=True)
class Contestant:
    """One way of doing a section's work.

    Attributes:
        name: its line in the table
        run: does the work once; in a section that measures values, returns the value
        goal: the largest ratio to the baseline that is aimed for
    """

    name: str
    run: Callable[[], float | None]
    goal: float | None = None


@dataclass(frozen=True)
class Section:
    """Contestants that do the same work, and how it is measured.

    Attributes:
        title: what the work is, with its shapes
        unit: what a number of the table is, such as "ms a step"
        contestants: the ways of doing it
        baseline: the name of the contestant that the others are divided by
        parity: compares the paths that are measured and says what it compared; raises ParityError
        measure: "time" for the time of ``run``, "value" for what it returns (once, since it does not vary)
        scale: numbers are multiplied by this; times are in seconds
        further: other contestants that some are divided by as well, with the goals for those ratios
    """

    title: str
    unit: str
    contestants: Sequence[Contestant]
    baseline: str
    parity: Callable[[], str]
    measure: str = "time"
    scale: float = 1.0
    further: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Benchmark(Protocol):
    """What a module of this folder defines to be a benchmark."""

    NAME: str
    HELP: str

    def sections(self, options: Options) -> Iterable[Section]:
        """The tables, one at a time."""


class RowResult(TypedDict):
    """A contestant's line: its numbers, and their ratios to the baseline of the same rounds."""

    name: str
    median: float
    min: float
    max: float
    ratio: float
    ratio_min: float
    ratio_max: float
    goal: float | None
    meets_goal: bool | None
    values: list[float]


class FurtherResult(TypedDict):
    """A contestant's ratios to another baseline."""

    name: str
    baseline: str
    ratio: float
    ratio_min: float
    ratio_max: float
    goal: float
    meets_goal: bool


class SectionResult(TypedDict, total=False):
    """A table; "error" instead of "parity", "rows" and "further" where parity failed."""

    title: str
    unit: str
    baseline: str
    measure: str
    load_before: float
    load_after: float
    parity: str
    error: str
    rows: list[RowResult]
    further: list[FurtherResult]


@dataclass
class Row:
    """A contestant's numbers; ``ratios`` are to the baseline of the same round."""

    name: str
    goal: float | None
    values: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def result(self) -> RowResult:
        """The line of the table."""
        ratio = statistics.median(self.ratios)
        return {
            "name": self.name,
            "median": statistics.median(self.values),
            "min": min(self.values),
            "max": max(self.values),
            "ratio": ratio,
            "ratio_min": min(self.ratios),
            "ratio_max": max(self.ratios),
            "goal": self.goal,
            "meets_goal": None if self.goal is None else ratio <= self.goal,
            "values": self.values,
        }


def discover() -> dict[str, Benchmark]:
    """The benchmark modules of this folder by name."""
    found: dict[str, Benchmark] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem == "__init__":
            continue
        module = importlib.import_module(f"{__package__}.{path.stem}")
        if hasattr(module, "NAME"):
            assert module.NAME not in found, module.NAME
            found[module.NAME] = cast(Benchmark, module)
    return found


def measure_section(section: Section, options: Options) -> list[Row]:
    """Rows of a section whose parity check has passed."""
    contestants = [
        contestant
        for contestant in section.contestants
        if contestant.name == section.baseline
        or not options.only
        or any(part in contestant.name for part in options.only)
    ]
    rows = [Row(contestant.name, contestant.goal) for contestant in contestants]
    base = next(row for row in rows if row.name == section.baseline)
    timed = section.measure == "time"
    repeats = dict.fromkeys((contestant.name for contestant in contestants), 1)
    for turn in range(-WARM_UP_ROUNDS if timed else 0, options.rounds if timed else 1):
        for contestant, row in zip(contestants, rows):
            value = _time(contestant.run, options.clock, repeats[contestant.name]) if timed else _value(contestant)
            if turn < 0:
                repeats[contestant.name] = max(1, math.ceil(options.least_seconds / max(value, 1e-9)))
            if turn >= 0:
                row.values.append(section.scale * value)
        if turn >= 0:
            for row in rows:
                row.ratios.append(row.values[-1] / base.values[-1])
    return rows


def _value(contestant: Contestant) -> float:
    value = contestant.run()
    assert value is not None, contestant.name
    return value


def _time(run: Callable[[], object], clock: str, repeats: int) -> float:
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    gc.collect()
    start = now()
    for _ in range(repeats):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (now() - start) / repeats


def run_sections(sections: Iterable[Section], options: Options) -> Iterator[SectionResult]:
    """The result of every section as it is done; "error" instead of rows where parity failed."""
    for section in sections:
        if options.sections and not any(part in section.title for part in options.sections):
            continue
        result: SectionResult = {
            "title": section.title,
            "unit": section.unit,
            "baseline": section.baseline,
            "measure": section.measure,
            "load_before": os.getloadavg()[0],
        }
        try:
            result["parity"] = section.parity()
        except ParityError as error:
            result["error"] = str(error)
        else:
            rows = measure_section(section, options)
            result["rows"] = [row.result() for row in rows]
            result["further"] = _further(section, {row.name: row for row in rows})
        result["load_after"] = os.getloadavg()[0]
        yield result
        # Sections are built one at a time, so that the models of one are gone before the next.
        del section
        gc.collect()


def _further(section: Section, rows: Mapping[str, Row]) -> list[FurtherResult]:
    """Ratios to other baselines of the same rounds."""
    found: list[FurtherResult] = []
    for baseline, goals in section.further.items():
        for name, goal in goals.items():
            if name in rows and baseline in rows:
                ratios = [one / other for one, other in zip(rows[name].values, rows[baseline].values, strict=True)]
                found.append(
                    {
                        "name": name,
                        "baseline": baseline,
                        "ratio": statistics.median(ratios),
                        "ratio_min": min(ratios),
                        "ratio_max": max(ratios),
                        "goal": goal,
                        "meets_goal": statistics.median(ratios) <= goal,
                    }
                )
    return found


def assert_parity(what: str, one: torch.Tensor, other: torch.Tensor, tolerance: float) -> float:
    """The largest difference between two tensors; raises ParityError above the tolerance."""
    difference = float((one.detach() - other.detach()).abs().max())
    if not difference <= tolerance:
        raise ParityError(f"{what}: the largest difference is {difference:.3g}, allowed are {tolerance:.3g}")
    return difference
