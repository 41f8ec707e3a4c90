"""Output of commands: a table on the terminal, a JSON file, a figure."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_ms.errors import UsageError
from fairseq_ms_pipeline.files import complete, complete_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by label."""
DASHES = ("-", "--", "-.", ":")


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns side by side; the first is aligned left, numbers right, None is a dash."""
    cells = [[str(cell) for cell in header], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(not isinstance(row[column], str) for row in rows) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric)]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1e-3 and cell != 0 else f"{cell:.4f}".rstrip("0").rstrip(".")
    return str(cell)


def check_outputs(args: argparse.Namespace) -> None:
    """Raise UsageError now rather than after the work when --json or another file could not be written then."""
    files = {name: getattr(args, name, None) for name in ("json", "png", "report", "records")}
    for name, path in files.items():
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise UsageError(f"--{name} must lie in a folder that exists: got {path}")
        if path is not None and Path(path).is_dir():
            raise UsageError(f"--{name} must name a file: {path} is a folder")
    if (png := files["png"]) is not None:
        if Path(png).suffix != ".png":
            raise UsageError(f"--png must end in .png: got {png}")
        require_package("matplotlib", "--png", "matplotlib")


def write_outputs(
    args: argparse.Namespace,
    content: Mapping[str, object],
    draw: Callable[[Figure], None] | None = None,
    width: float = 7.0,
    height: float = 4.5,
) -> None:
    """Write the JSON file, which says of what command it is, and the figure, as far as they are wanted."""
    if args.json:
        write_json(args.json, {"command": args.command, **content})
    if draw and args.png:
        write_png(args.png, draw, width, height)


def require_package(module: str, what: str, install: str) -> None:
    """Raise UsageError, saying what to install, when an optional package is missing."""
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{what} needs the package {install}: run pip install {install}")


def write_json(path: str | Path, content: object, allow_nan: bool = False) -> None:
    """Write a JSON file at once or not at all; infinity and NaN are refused unless they are allowed."""
    # Of the types that json does not know, results have numpy's.
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=allow_nan, default=lambda value: value.tolist())
    write_text(path, text + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file at once or not at all."""
    with complete_text(Path(path)) as file:
        file.write(text)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which has its name when it is complete; UsageError for one that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"OUT must be a folder that does not exist or is empty: got {out}")
    if out.absolute() == Path.cwd():
        raise UsageError(f"OUT must be another folder than the one that this command runs in: got {out}")
    made = [folder for folder in out.parents if not folder.exists()]
    unfinished = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if out.exists():
            out.rmdir()
        unfinished.replace(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        for folder in made:
            # What holds the new folder is not empty.
            with suppress(OSError):
                folder.rmdir()


def write_png(
    path: str,
    draw: Callable[[Figure], None],
    width: float = 7.0,
    height: float = 4.5,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Draw a figure and write it at once or not at all; ``draw`` is given matplotlib's Figure.

    ``texts`` are what the file says of itself, by keyword.
    Lines are told apart by marker and dash pattern as well, so a figure reads the same without colour.
    """
    from cycler import cycler
    from matplotlib import rc_context, rcParamsDefault
    from matplotlib.figure import Figure

    colours = rcParamsDefault["axes.prop_cycle"].by_key()["color"]
    lines = cycler(color=colours, marker=list("os^DvPX*<>"), linestyle=[DASHES[index % 4] for index in range(10)])
    lines += cycler(markerfacecolor=["white" if index % 2 else colour for index, colour in enumerate(colours)])
    style: Any = {"axes.prop_cycle": lines, "lines.markersize": 5, "lines.linewidth": 1.3, "legend.frameon": False}
    style |= {"axes.grid": True, "grid.linewidth": 0.4, "grid.alpha": 0.6, "axes.axisbelow": True}
    with rc_context(style):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        draw(figure)
        with complete(Path(path)) as part:
            figure.savefig(part, format="png", metadata=texts)


def plot_panel(axes: Axes, lines: Lines, xlabel: str, ylabel: str, legend: bool = True) -> None:
    """Draw lines, points (x, y) by label, and finish their axes."""
    for label, points in lines.items():
        axes.plot(*zip(*points), label=label)
    finish_axes(axes, xlabel, ylabel, legend)


def finish_axes(axes: Axes, xlabel: str, ylabel: str, legend: bool = True) -> None:
    """Labels and legend."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if legend:
        axes.legend()


def powers_of_two(axes: Axes) -> None:
    """A logarithmic x axis, whose marks are written out."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
