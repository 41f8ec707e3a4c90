"""What commands that ask several checkpoints about the same tokens have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import report
from fairseq_ms.tools.arguments import register, split_label

if TYPE_CHECKING:
    from fairseq_ms.tools.checkpoints import Checkpoint


def load(args: argparse.Namespace, alike: bool = True) -> list[Checkpoint]:
    """The checkpoints of the command line.

    Raises UsageError when two have one label, unless all read the same symbols, where they are to be ``alike``, and for
    a window that no model has.
    """
    labels = [split_label(spec)[0] for spec in args.checkpoints]
    if again := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f"CHECKPOINT must have a label of its own, as in NAME=FILE: got {again[0]!r} twice")
    register()
    from fairseq_ms.tools import checkpoints

    loaded = [checkpoints.load(spec, args.data, args.cpu) for spec in args.checkpoints]
    if alike:
        checkpoints.require_one_dictionary(loaded, args.command)
    windows = (args.tokens_per_sample, args.context_window) if hasattr(args, "context_window") else ()
    given = [tokens for tokens in windows if tokens is not None]
    if given and all(checkpoint.streaming for checkpoint in loaded):
        raise UsageError(
            f"--tokens-per-sample and --context-window are of models without a memory: {loaded[0].label} reads "
            f"the text once, got {given[0]}"
        )
    return loaded


def write(
    args: argparse.Namespace,
    loaded: Sequence[Checkpoint],
    results: object,
    draw: Callable[[report.Figure], None] | None = None,
) -> None:
    """Write the JSON file, with settings and checkpoints, and the figure, as far as they are wanted."""
    outside = ("command", "json", "png", "checkpoints")
    settings = {name: value for name, value in vars(args).items() if name not in outside}
    described = [checkpoint.describe() for checkpoint in loaded]
    report.write_outputs(args, {"settings": settings, "checkpoints": described, "results": results}, draw)


def bootstrap_band(values_RC: np.ndarray, seed: int, resamples: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """The band (C,), (C,) that holds the mean over rows with 95% probability, rows being resampled."""
    generator = np.random.default_rng(seed)
    rows = values_RC.shape[0]
    weights = generator.multinomial(rows, np.full(rows, 1.0 / rows), size=resamples) / rows
    low, high = np.quantile(weights @ values_RC, [0.025, 0.975], axis=0)
    return low, high


def band_table(column: str, names: Sequence[object], bands: Mapping[str, tuple[np.ndarray, ...]], digits: int) -> str:
    """A table of one row a name; of each checkpoint, value, low and high (C,) of the ``names``."""
    header = [column, *(cell for label in bands for cell in (label, "95% band"))]
    columns: list[Sequence[object]] = [names]
    for values, low, high in bands.values():
        columns.append([round(float(value), 4) for value in values])
        columns.append([f"{bottom:.{digits}f} .. {top:.{digits}f}" for bottom, top in zip(low, high)])
    return report.format_table(header, list(zip(*columns)))


def draw_bands(
    figure: report.Figure, xs: Sequence[float], bands: Mapping[str, tuple[np.ndarray, ...]], xlabel: str, ylabel: str
) -> None:
    """A line a checkpoint, in its band, over a logarithmic axis."""
    axes = figure.add_subplot()
    for label, (values, low, high) in bands.items():
        (line,) = axes.plot(xs, values, label=label)
        axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color())
    report.powers_of_two(axes)
    report.finish_axes(axes, xlabel, ylabel)
