"""What commands that ask several checkpoints about the same tokens have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import checkpoints, report


def load(args: argparse.Namespace) -> list[checkpoints.Checkpoint]:
    """The checkpoints of the command line; UsageError unless results can be written and all read the same symbols."""
    report.check_outputs(args)
    loaded = checkpoints.load_all(args.checkpoints, args.data, args.cpu)
    checkpoints.require_one_dictionary(loaded, args.command)
    return loaded


def check_window_is_used(args: argparse.Namespace, loaded: Sequence[checkpoints.Checkpoint]) -> None:
    """Raise UsageError when a window is given and no model has one."""
    given = args.tokens_per_sample if args.tokens_per_sample is not None else args.context_window
    if given is not None and all(checkpoint.streaming for checkpoint in loaded):
        raise UsageError(
            f"--tokens-per-sample and --context-window are of models without a memory: {loaded[0].label} reads "
            f"the text once, got {given}"
        )


def write(
    args: argparse.Namespace,
    loaded: Sequence[checkpoints.Checkpoint],
    results: object,
    draw: Callable[[report.Figure], None] | None = None,
) -> None:
    """Write the JSON file, with settings and checkpoints, and the figure, as far as they are wanted."""
    outside = ("command", "json", "png", "checkpoints")
    settings = {name: value for name, value in vars(args).items() if name not in outside}
    described = [checkpoint.describe() for checkpoint in loaded]
    report.write_outputs(args, {"settings": settings, "checkpoints": described, "results": results}, draw)


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
