"""How long work takes on a device, and how many rows of it fit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.device import Device
from benchmarks.gpu.rows import GB, Cell
from benchmarks.losses import hidden_bytes
from fairseq_ms.analysis.saved_bytes import saved_bytes

# Of the device's memory, for a batch as large as fits; the allocator cannot use every byte.
SHARE = 0.9


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: timed rounds
        least_seconds: work that takes less is done several times in a round, and the time divided
        most_rows: of a batch
    """

    rounds: int = 3
    least_seconds: float = 0.2
    most_rows: int = 256


QUICK = Effort(1, 0.0, 2)


def seconds(device: Device, run: Callable[[], object], effort: Effort) -> list[float]:
    """The median time of ``run()``, the shortest and the longest, after one round to warm up, or two short ones."""

    def once(repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        device.wait()
        return (time.perf_counter() - began) / repeats

    first = once(1)
    # What is compiled or allocated in the first round would let work look longer than it is.
    first = once(1) if first < 1.0 else first
    repeats = max(1, math.ceil(effort.least_seconds / max(first, 1e-6)))
    taken = [once(repeats) for _ in range(effort.rounds)]
    return [statistics.median(taken), min(taken), max(taken)]


def largest_batch(device: Device, peak_of: Callable[[int], int], most: int) -> tuple[int, int]:
    """How many rows fit, ``most`` at the most, and the peak in bytes of a step over so many.

    ``peak_of(rows)`` runs a step. Two small steps tell what a further row takes. The error of the device is raised if
    not even one row fits.
    """
    fits, peak = 1, peak_of(1)
    few = min(8, most)
    # The second, so that what a library allocates in its first call is in both.
    peak, more = peak_of(1), _peak_or_none(device, peak_of, few)
    rows = few
    if more is not None:
        fits, a_row, peak = few, max(1.0, (more - peak) / max(1, few - 1)), more
        rows = min(most, few + max(0, int((SHARE * device.memory - more) / a_row)))
        # Multiples of eight, as one would choose.
        rows -= rows % 8 if rows > 8 else 0
    while rows > fits:
        found = _peak_or_none(device, peak_of, rows)
        if found is not None:
            return rows, found
        rows = min(rows - 1, rows * 7 // 8)
    return fits, peak


def _peak_or_none(device: Device, peak_of: Callable[[int], int], rows: int) -> int | None:
    """None where so many rows do not fit."""
    device.release()
    try:
        return peak_of(rows)
    except Exception as error:
        if not device.ran_out(error):
            raise
    # Only here, when the error holds no tensor of the step any more.
    device.release()
    return None


def step(modules: list[nn.Module], loss_of: Callable[[], Tensor]) -> None:
    """Forward and backward; gradients are made anew, as in the first of a trainer's batches."""
    for module in modules:
        module.zero_grad(set_to_none=True)
    loss_of().backward()


def leave(modules: Iterable[nn.Module]) -> None:
    """Take modules that a comparison brings along off the device, so that their weights are in no peak."""
    for module in modules:
        module.cpu()


def training_numbers(
    device: Device,
    model: nn.Module,
    sample_of: Callable[[int], Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    effort: Effort,
) -> dict[str, Cell]:
    """Training steps without optimizer, over as many rows as fit.

    ``sample_of(rows)`` is a batch on the device, with its number of targets as "ntokens". Raises ValueError on a loss
    that is not a number.
    """

    def peak_of(rows: int) -> int:
        sample = sample_of(rows)
        return device.peak(lambda: step([model], lambda: loss_of(model, sample)))

    rows, peak = largest_batch(device, peak_of, effort.most_rows)
    one, sample = sample_of(1), sample_of(rows)
    with torch.no_grad():
        if not bool(loss_of(model, one).isfinite()):
            raise ValueError("the loss is not finite")
    kept = saved_bytes(lambda: loss_of(model, one), model) + hidden_bytes(loss_of(model, one))
    taken = seconds(device, lambda: step([model], lambda: loss_of(model, sample)), effort)
    model.zero_grad(set_to_none=True)
    return {
        "rows": rows,
        "peak": peak / GB,
        "peak_per_target": peak / sample["ntokens"] / 1e3,
        "kept": kept / one["ntokens"] / 1e3,
        "rate": sample["ntokens"] / taken[0],
        "time": [1e6 * value / sample["ntokens"] for value in taken],
    }


TRAINING_COLUMNS = {
    "rows": "rows that fit",
    "peak": "peak, GB",
    "peak_per_target": "peak, kB a target",
    "kept": "kept for backward, kB a target",
    "rate": "targets a second",
    "time": "us a target",
}
