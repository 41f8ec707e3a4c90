"""Tables, their rows, and what becomes of a row: numbers, or a word about why there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Cell = float | str | list[float]
"""A number, a word in its place, or a number a round."""

Record = dict[str, Any]
"""A row's line in the file: its "key", one of ``OUTCOMES``, when its cohort was timed ("together"), and whether rounds
are missing ("unfinished")."""

Settings = tuple[str, ...]
"""What tells a row from the others of its table: the model first, the precision last where there is one."""

NUMBERS, DOES_NOT_FIT, ABSENT, FAILED = OUTCOMES = ("numbers", "does not fit", "not installed", "failed")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GB = 1e9
TIME = "time"


class NotInstalledError(Exception):
    """A row needs a package that is not there; the message is its name."""


class ParityError(Exception):
    """Two paths that have to agree do not; nothing of their table is measured."""


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        device: "cpu" or "cuda"
        quick: tiny shapes, to see that everything runs; the numbers then mean nothing
        rounds: timed rounds; every row of a cohort runs once in each
        clock: "wall", or "cpu" for the time that the process had a processor, on machines that others use as well
        least_seconds: work that takes less is done several times in a round, and the time divided
        threads: of a CPU; None for torch's own choice
    """

    device: str = "cpu"
    quick: bool = False
    rounds: int = 7
    clock: str = "wall"
    least_seconds: float = 0.25
    threads: int | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def precisions(self) -> tuple[str, ...]:
        """What models train in on the device, the more valuable first."""
        return ("bf16", "fp16") if self.on_gpu else ("float32",)


@dataclass
class Work:
    """What a row does, built on the device.

    Attributes:
        run: what is timed
        units: targets, tokens, steps or whatever else its time is divided by
        others: the other columns, measured in a process that does nothing else
        before: is called before each ``run``, and not timed
    """

    run: Callable[[], object]
    units: float = 1.0
    others: Callable[[], Mapping[str, Cell]] = field(default=lambda: {})
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Row:
    """One line of a table: what tells it apart, how to build its work, and with which rows it takes turns."""

    settings: Settings
    build: Callable[[], Work]
    cohort: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of one kind.

    Attributes:
        name: what the user types
        title: its heading, and its line in the list of tables
        about: a paragraph under the heading: the shapes, and what was done
        settings: headings of what tells rows apart
        columns: headings of the numbers by their keys; ``TIME`` is the one that rounds are timed for
        rows: the lines
        scale: times are seconds; they are multiplied by this
        ratios: headings of the time's ratios, and the settings of the row that a row's time is divided by
        parity: compares the paths that are measured and says what it compared; raises ParityError
    """

    name: str
    title: str
    about: str
    settings: Sequence[str]
    columns: Mapping[str, str]
    rows: Sequence[Row]
    scale: float = 1e3
    ratios: Mapping[str, Callable[[Settings], Settings]] = field(default_factory=dict)
    parity: Callable[[], str] | None = None

    def key(self, row: Row) -> str:
        """What a row is called in the file of records."""
        return " | ".join((self.name, *row.settings))

    def cohorts(self) -> Mapping[str, list[Row]]:
        """The rows that take turns."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.cohort, []).append(row)
        return found

    def compared_with(self, rows: Iterable[Row]) -> list[Row]:
        """These rows of a cohort and those of it that their times are divided by, in the table's order."""
        asked = list(rows)
        wanted = {row.settings for row in asked}
        wanted |= {base(settings) for base in self.ratios.values() for settings in list(wanted)}
        return [row for row in self.rows if row.settings in wanted and row.cohort == asked[0].cohort]


def settled(record: Record) -> bool:
    """Whether measuring the row again could show nothing new; of fewer rounds than were asked for, it could."""
    return (NUMBERS in record and not record.get("unfinished")) or DOES_NOT_FIT in record


def to(settings: Settings, **changes: str) -> Settings:
    """Settings with some of them changed; "model", or "at1" for the second and so on."""
    found = list(settings)
    for name, value in changes.items():
        found[0 if name == "model" else int(name.removeprefix("at"))] = value
    return tuple(found)


def assert_parity(what: str, one: Tensor, other: Tensor, tolerance: float) -> float:
    """The largest difference between two tensors; raises ParityError above the tolerance."""
    difference = float((one.detach() - other.detach()).abs().max())
    if not difference <= tolerance:
        raise ParityError(f"{what}: the largest difference is {difference:.3g}, allowed are {tolerance:.3g}")
    return difference
