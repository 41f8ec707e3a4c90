"""What commands that ask several checkpoints about the same tokens have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fairseq_ms.analysis import arguments, report

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from fairseq_ms.analysis.checkpoints import Checkpoint


def load(args: argparse.Namespace) -> list[Checkpoint]:
    """The checkpoints of the command line; UsageError unless results can be written and all read the same symbols."""
    from fairseq_ms.analysis import checkpoints

    report.check_outputs(args.json, getattr(args, "png", None))
    loaded = arguments.load_checkpoints(args)
    checkpoints.require_one_dictionary(loaded, args.command)
    return loaded


def write(args: argparse.Namespace, loaded: list[Checkpoint], results: object, draw: Callable[[Figure], None]) -> None:
    """Write the JSON file and the figure, as far as they are wanted."""
    arguments.write_results(args, loaded, results)
    if args.png:
        report.write_png(args.png, draw)


def band_table(column: str, names: Sequence[object], bands: Mapping[str, tuple[np.ndarray, ...]], digits: int) -> str:
    """A table of one row a name; of each checkpoint, value, low and high (C,) of the ``names``."""
    header = [column, *(cell for label in bands for cell in (label, "95% band"))]
    columns: list[Sequence[object]] = [names]
    for values, low, high in bands.values():
        columns.append([round(float(value), 4) for value in values])
        columns.append([f"{bottom:.{digits}f} .. {top:.{digits}f}" for bottom, top in zip(low, high)])
    return report.format_table(header, list(zip(*columns)))


def draw_bands(
    figure: Figure, xs: Sequence[float], bands: Mapping[str, tuple[np.ndarray, ...]], xlabel: str, ylabel: str
) -> None:
    """A line a checkpoint, in its band, over a logarithmic axis."""
    axes = figure.add_subplot()
    for index, (label, (values, low, high)) in enumerate(bands.items()):
        line = report.plot_line(axes, index, xs, values.tolist(), label)
        axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    report.finish_axes(axes, xlabel, ylabel)
