#!/usr/bin/env python3
"""Tables and figures of docs/claims.md from the results of driver.py.

    python user_dir_examples/claims/tables.py runs/claims/results.jsonl [MORE.jsonl ...] [--figures docs/figures]

Prints a Markdown table of the claims of each paper with their verdicts, and one for each part that has results. Several
seeds are given as their mean, with the lowest and the highest in brackets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from claims import CLAIMS, Claim, Record, in_bits, measured, of_run, verdict
from fairseq_ms.analysis import report
from runs import PARTS, RUNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The runs whose wall-clock a claim is about; of other parts, all are drawn.
OVER_HOURS = {"hierarchical": ("end_to_end", "end_to_end_as_long", "finetune")}


def read(files: Sequence[Path]) -> list[Record]:
    """The records of all files."""
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def spread(values: Sequence[float], digits: int) -> str:
    """The mean, with the lowest and the highest of several."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def claims_table(records: Sequence[Record], claims: Sequence[Claim]) -> str:
    """A row for each claim: the paper's numbers, those of the two runs, and what they say."""
    lines = ["| claim | paper | here | verdict |", "| --- | --- | --- | --- |"]
    for claim in claims:
        sides = [(claim.one, claim.measure), (claim.other, claim.other_measure or claim.measure)]
        values = [measured(records, *side) for side in sides]
        here = "; ".join(cell(records, *side, found) for side, found in zip(sides, values) if found)
        one, other = (
            found if in_bits(run) else [log2(value) for value in found] for (run, _), found in zip(sides, values)
        )
        judged = verdict(one, claim.relation, other)
        lines.append(f"| {claim.words} ({claim.place}) | {claim.paper} | {here} | {judged} |")
    return "\n".join(lines)


def cell(records: Sequence[Record], name: str, measure: str, values: Sequence[float]) -> str:
    """A run's title, what was measured, the result, and what a training step keeps if the claim is about memory."""
    (run,) = [run for run in RUNS if run.full_name == name]
    kept = of_run(records, name)[0]["kept_bytes_per_target"]
    memory = f" ({kept / 1000:.1f} kB)" if kept else ""
    where = "" if measure == "test" else f", {measure}"
    return f"{run.title}{where}: {spread(values, 3 if in_bits(name) else 1)}{memory}"


def table(records: Sequence[Record], part: str) -> str:
    """A part's rows; "" where nothing of it is done."""
    digits = 3 if part == "hierarchical" else 1
    columns = list(dict.fromkeys(column for run in RUNS if run.part == part for column, _ in run.columns))
    lines = []
    for run in RUNS:
        found = of_run(records, run.full_name) if run.part == part else []
        if not found:
            continue
        # The first phase of HAED has a loss of its own kind.
        value: Callable[[float], float] = (lambda bits: bits) if part == "hierarchical" else (lambda bits: 2**bits)
        best = [value(min(record["valid_bits"])) for record in found] if run.columns else []
        last = [value(record["valid_bits"][-1]) for record in found] if run.columns else []
        tests = [[record["tests"][column] for record in found if column in record["tests"]] for column in columns]
        cells = [spread(values, digits) if values else "" for values in (best, last, *tests)]
        if PARTS[part].memory:
            cells.append(f"{found[0]['kept_bytes_per_target'] / 1000:.1f} kB")
        hours = sum(record["hours"][-1] for record in found) / len(found)
        cells += [f"{found[0]['parameters'] / 1e6:.1f} M", str(found[0]["updates"][-1]), f"{hours:.2f}"]
        lines.append(f"| {run.title} | {' | '.join(cells)} |")
    if not lines:
        return ""
    kept = ["kept for backward, per target"] if PARTS[part].memory else []
    header = ["", "best valid", "last valid", *columns, *kept, "parameters", "updates", "hours"]
    return "\n".join([f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}", *lines])


def draw(figure: Figure, records: Sequence[Record], part: str) -> None:
    """The validation curves of a part: over updates, and over hours or, where claims are about it, memory."""
    panels = ["updates", "memory"] if PARTS[part].memory else ["updates", "hours"]
    runs = [run for run in RUNS if run.part == part and run.columns and of_run(records, run.full_name)]
    for axes, over in zip(figure.subplots(1, 2), panels):
        for index, run in enumerate(runs):
            if over == "hours" and run.name not in OVER_HOURS.get(part, run.name):
                continue
            for seed, record in enumerate(of_run(records, run.full_name)):
                # Seeds of a run look alike, and a label that begins with _ is not in the legend.
                label = "_" * seed + run.title
                if over == "memory":
                    kept = record["kept_bytes_per_target"] / 1000
                    report.plot_line(axes, index, [kept], [record["tests"]["test"]], label)
                else:
                    report.plot_line(axes, index, record[over], record["valid_bits"], label)
        xlabel = {"updates": "updates", "hours": "hours of training", "memory": "kept for backward, kB per target"}[
            over
        ]
        ylabel = f"test {PARTS[part].metric}" if over == "memory" else "validation loss, bits"
        report.finish_axes(axes, xlabel, ylabel, legend=axes.get_subplotspec().is_first_col())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="write claims_PART.png there as well")
    args = parser.parse_args()
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
    records = read(args.results)
    for paper, claims in CLAIMS.items():
        print(f"\n{paper}: claims\n\n{claims_table(records, claims)}")
    for part, settings in PARTS.items():
        text = table(records, part)
        if not text:
            continue
        print(f"\n{part}: {settings.metric}\n\n{text}")
        if args.figures:
            path = args.figures / f"claims_{part}.png"
            report.write_png(str(path), lambda figure, part=part: draw(figure, records, part), width=13, height=5)


if __name__ == "__main__":
    main()
