"""Tables, their rows, and what becomes of a row: numbers, or a word about why there are none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.device import Device

Cell = float | str | list[float]
"""A number, a word in its place, or a median with the smallest and the largest value."""

Record = dict[str, Any]
"""A row's line in the file: its "key", how many "seconds" it took, and one of ``OUTCOMES``."""

NUMBERS, DOES_NOT_FIT, ABSENT, FAILED = OUTCOMES = ("numbers", "does not fit", "not installed", "failed")
PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
GB = 1e9


class NotInstalledError(Exception):
    """A row needs a package that is not there; the message is its name."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        settings: what tells it from the other lines: the model first
        measure: its numbers by column; any exception is a row that says so
        group: lines of one group are compared with the baseline among them
    """

    settings: tuple[str, ...]
    measure: Callable[[Device], Mapping[str, Cell]]
    group: str = ""


@dataclass(frozen=True)
class Table:
    """Lines of one kind.

    Attributes:
        name: what ``--only`` and a row's key call it
        title: its heading in the report
        about: a paragraph under the heading
        settings: headings of what tells lines apart
        columns: headings of the numbers, by their keys
        rows: the lines
        compared: the column whose ratio to the baseline is shown as well
        baseline: the first setting of the lines that others are divided by
    """

    name: str
    title: str
    about: str
    settings: Sequence[str]
    columns: Mapping[str, str]
    rows: Sequence[Row]
    compared: str | None = None
    baseline: str | None = None

    def key(self, row: Row) -> str:
        """What a row is called in the file of records."""
        return " | ".join((self.name, *row.settings))


def settled(record: Record) -> bool:
    """Whether measuring the row again could show nothing new."""
    return NUMBERS in record or DOES_NOT_FIT in record


def run_row(key: str, row: Row, device: Device) -> Record:
    """Measure a row, whatever comes of it."""
    began = time.perf_counter()
    record: Record
    try:
        record = {NUMBERS: dict(row.measure(device))}
    except NotInstalledError as missing:
        record = {ABSENT: str(missing)}
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        record = {DOES_NOT_FIT if device.ran_out(error) else FAILED: why}
    device.release()
    return {"key": key, **record, "seconds": round(time.perf_counter() - began, 1)}
