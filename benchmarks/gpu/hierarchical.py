"""HAED: its phases, chunks with and without padding, and beside MEGABYTE-pytorch and a character transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import haed
from benchmarks.gpu.device import Device
from benchmarks.gpu.rows import GB, PRECISIONS, Cell, NotInstalledError, Row, Table
from benchmarks.gpu.timing import QUICK, TRAINING_COLUMNS, Effort, largest_batch, leave, seconds, step, training_numbers

MEGABYTE = "MEGABYTE-pytorch"
# Of 256 words a row, four times as many of which Python's documentation has; the first phase reads all of them.
MOST_ROWS = 60
PADDED, UNPADDED, FIRST = "end to end, padded chunks", "end to end, chunks without padding", "first phase"


def tables(quick: bool) -> list[Table]:
    """Three tables."""
    return [_phases(quick), _beside(quick), _generation(quick)]


def _per_precision(names: tuple[str, ...], measure: Callable[..., Mapping[str, Cell]], quick: bool) -> list[Row]:
    return [
        Row((name, precision), partial(measure, name=name, dtype=dtype, quick=quick), group=precision)
        for precision, dtype in PRECISIONS.items()
        for name in names
    ]


def _phases(quick: bool) -> Table:
    about = (
        "The presets `*_iem` (12 heads of 32, 2,000 decoder units) on rows of 256 words of Python's documentation, at "
        f"most {MOST_ROWS} of them; the first phase has 3 further batches. Ratios are to padded chunks."
    )
    columns = {"rows": "rows", "peak": "peak, GB", "kept": "kept for backward, kB a row", "time": "ms a row"}
    rows = _per_precision((PADDED, UNPADDED, FIRST), phase_numbers, quick=quick)
    return Table("haed", "HAED, a training step", about, ["step", "precision"], columns, rows, "time", PADDED)


def phase_numbers(device: Device, name: str, dtype: torch.dtype, quick: bool) -> Mapping[str, Cell]:
    """Steps of one kind over as many rows as fit."""

    def steps_over(rows: int) -> haed.Steps:
        steps = haed.Steps(quick, rows, device.torch, dtype)
        leave([steps.model if name == FIRST else steps.first])
        return steps

    def loss_of(steps: haed.Steps) -> Tensor:
        return {PADDED: steps.padded, UNPADDED: steps.unpadded, FIRST: steps.first_phase}[name]()

    def peak_of(rows: int) -> int:
        steps = steps_over(rows)
        return device.peak(lambda: step([steps.model, steps.first], lambda: loss_of(steps)))

    rows, peak = largest_batch(device, peak_of, QUICK.most_rows if quick else MOST_ROWS)
    steps = steps_over(rows)
    kept = steps.bytes_kept(lambda: loss_of(steps))
    effort = QUICK if quick else Effort()
    taken = seconds(device, lambda: step([steps.model, steps.first], lambda: loss_of(steps)), effort)
    return {
        "rows": rows,
        "peak": peak / GB,
        "kept": kept / rows / 1e3,
        "time": [1e3 * value / rows for value in taken],
    }


def _beside(quick: bool) -> Table:
    about = (
        f"Models of about 14 million parameters over rows of {48 if quick else 1048:,} characters of Python's "
        f"documentation; {MEGABYTE} in its README's proportions. Ratios are to it."
    )
    rows = _per_precision((MEGABYTE, "haed_wt103"), character_numbers, quick=quick)
    return Table(
        "characters", "HAED beside MEGABYTE, a training step", about, ["model", "precision"], TRAINING_COLUMNS, rows,
        "time", MEGABYTE,
    )  # fmt: skip


def character_numbers(device: Device, name: str, dtype: torch.dtype, quick: bool) -> Mapping[str, Cell]:
    """Training steps over characters."""
    length = 48 if quick else 1048
    most = QUICK.most_rows if quick else 128
    lines, dictionary = haed.text_rows(most, 400)
    tokens = haed.padded_batch(lines, dictionary)[:, : length + 1].to(device.torch)
    model: nn.Module = haed.preset("haed_wt103", dictionary, length, quick)
    if name == MEGABYTE:
        model = _megabyte(len(dictionary), length, quick).model
    model = model.to(device.torch, dtype).train()

    def sample_of(rows: int) -> dict[str, object]:
        return {"tokens": tokens[:rows], "ntokens": tokens[:rows, 1:].numel()}

    def loss_of(module: nn.Module, sample: dict[str, Tensor]) -> Tensor:
        ids = sample["tokens"]
        if name == MEGABYTE:
            return module(ids[:, 1:], return_loss=True)
        return haed.loss_of(module(ids[:, :-1])[0], ids[:, 1:], dictionary.pad())

    return training_numbers(device, model, sample_of, loss_of, QUICK if quick else Effort(most_rows=most))


def _megabyte(symbols: int, positions: int, quick: bool) -> haed.Megabyte:
    if not haed.megabyte_is_here():
        raise NotInstalledError(MEGABYTE)
    return haed.Megabyte(symbols, positions, quick)


def _generation(quick: bool) -> Table:
    about = (
        f"One row after a prompt of {haed.PROMPT:,} characters, models as above and a `vanilla_lm` of 8 layers of 384; "
        f"{MEGABYTE} reads the whole row again for every character. Ratios are to `vanilla_lm`."
    )
    rows = _per_precision(("vanilla_lm", "haed", MEGABYTE), generation_numbers, quick=quick)
    columns = {"character": "ms a character", "prompt": "prompt, ms", "peak": "peak, GB"}
    return Table(
        "characters-generation", "HAED beside others, generation", about, ["model", "precision"], columns, rows,
        "character", "vanilla_lm",
    )  # fmt: skip


def generation_numbers(device: Device, name: str, dtype: torch.dtype, quick: bool) -> Mapping[str, Cell]:
    """Time of a character behind the prompt, and of the prompt where it is read once."""
    generation = haed.Generation(quick, device.torch, dtype)
    effort = QUICK if quick else Effort()
    leave(model for other, model in generation.models.items() if other != name)
    if name == MEGABYTE:
        if generation.megabyte is None:
            raise NotInstalledError(MEGABYTE)
        peak = device.peak(generation.without_cache)
        return {"character": [1e3 * v for v in seconds(device, generation.without_cache, effort)], "peak": peak / GB}
    if generation.megabyte is not None:
        leave([generation.megabyte.model])
    prompt = seconds(device, lambda: generation.prefilled(name), effort)
    peak = device.peak(lambda: generation.seconds(name))
    whole = seconds(device, lambda: generation.seconds(name), effort)
    return {
        "character": [1e3 * (value - prompt[0]) / generation.steps for value in whole],
        "prompt": [1e3 * value for value in prompt],
        "peak": peak / GB,
    }
