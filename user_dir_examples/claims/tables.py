#!/usr/bin/env python3
"""The tables and the figure of docs/papers/results_claims.md, from the results of driver.py.

    python user_dir_examples/claims/tables.py docs/papers/claims.jsonl docs/papers/recipes.jsonl
        [--page docs/papers/results_claims.md] [--figure docs/papers/figures/claims.png]

Prints a table of the claims of each paper with their verdicts, one for each part that has results, and one of the runs
that are not done; --page writes them into a page, after comments that name them. Several seeds are given as their
mean, with the lowest and the highest in brackets. The PNG holds what it shows as text, too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isinf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from claims import CLAIMS, PAPERS, Effect, Record, bits, effect, in_characters, of_run, verdict
from fairseq_ms.tools import report
from runs import PARTS, RUNS, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = re.compile(r"(<!-- table: (.+) -->\n\n)(?:\|.*\n)*")
# The text of the figure that holds its rows.
ROWS = "Rows"


def read(files: Sequence[Path]) -> list[Record]:
    """The records of all files."""
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def spread(values: Sequence[float], digits: int) -> str:
    """The mean, with the lowest and the highest of several."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def title(name: str) -> str:
    """Of a part/run."""
    return next(run.title for run in RUNS if run.full_name == name)


def apart(*titles: str) -> list[str]:
    """Titles without the parts at their ends that all of them have, which the setting of a test says."""
    parts = [name.split(", ") for name in titles]
    while min(map(len, parts)) > 1 and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    return [", ".join(part) for part in parts]


def signed(value: float, unit: str) -> str:
    """An effect, in the digits of its unit."""
    return f"{value:+.1f}%" if unit == "per cent" else f"{value:+.3f}"


def tested(records: Sequence[Record], claim: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Effect | None]]:
    """The tests of a claim that found something, or the first one."""
    found = [(test, effect(records, test)) for test in claim["tests"]]
    return [pair for pair in found if pair[1]] or found[:1]


def claims_table(records: Sequence[Record], paper: str) -> str:
    """A row for each test of each claim: the paper's numbers, ours, and what they say."""
    rows = []
    for claim in CLAIMS:
        if claim["paper"] != paper:
            continue
        unit, numbers = claim.get("unit", "bits"), claim.get("numbers", [])
        words = f"{claim['about']}: “{claim['sentence']}” ({claim['place']})"
        theirs = ", ".join(f"{number['model']} {number['value']}" for number in numbers)
        theirs += f": {signed(claim['effect'], unit)}" if numbers else ""
        for test, found in tested(records, claim):
            judged = verdict(found, claim.get("claimed", "less"), claim.get("effect"), test.get("void"))
            numeric = [here(records, test), "", "", ""]
            if found:
                interval = (
                    ""
                    if found.pairs == 1 or isinf(found.resolution) or found.low == found.high
                    else (f" ({signed(found.low, unit)} .. {signed(found.high, unit)})")
                )
                resolves = "" if found.pairs is None else "?" if isinf(found.resolution) else f"{found.resolution:.3f}"
                pairs = "" if found.pairs is None else str(found.pairs)
                numeric[1:] = [signed(found.mean, unit) + interval, resolves, pairs]
            rows.append([words, theirs, *numeric, judged])
            words = theirs = ""
    return markdown(["claim", "paper", "here", "effect", "resolves", "pairs", "verdict"], rows)


def here(records: Sequence[Record], test: Mapping[str, Any]) -> str:
    """What was compared, with the results of the seeds that both have."""
    setting = test["setting"]
    if "page" in test:
        return f"{setting}: {median(test['one']):g} and {median(test['other']):g} {test['unit']}"
    if "one" not in test:
        return ""
    measure = test.get("measure", "test")
    sides = [(test["one"], measure), (test["other"], test.get("other_measure", measure))]
    found = [bits(records, *side) for side in sides]
    characters = in_characters(test["one"])
    cells = []
    for name, values in zip(apart(title(test["one"]), title(test["other"])), found):
        shown = [
            values[seed] if characters else 2 ** values[seed]
            for seed in found[0]
            if seed in values and seed in found[1]
        ]
        cells.append(f"{name} {spread(shown, 3 if characters else 1) if shown else ''}".strip())
    return f"{setting}: {'; '.join(cells)}"


def part_table(records: Sequence[Record], part: str) -> str:
    """A part's rows; "" where nothing of it is done."""
    digits = 3 if in_characters(part) else 1
    columns = list(dict.fromkeys(column for run in RUNS if run.part == part for column in run.columns))
    rows, again = [], False
    for run in RUNS:
        found = list(of_run(records, run.full_name).values()) if run.part == part else []
        if not found:
            continue
        # The first phase of HAED has a loss of its own kind.
        value: Callable[[float], float] = (lambda bits: bits) if in_characters(part) else (lambda bits: 2**bits)
        best = [value(min(record["valid_bits"])) for record in found] if run.columns else []
        last = [value(record["valid_bits"][-1]) for record in found] if run.columns else []
        again = again or best != last
        tests = [[record["tests"][column] for record in found if column in record["tests"]] for column in columns]
        cells = [spread(values, digits) if values else "" for values in (best, last, *tests)]
        if PARTS[part].memory:
            cells.append(f"{found[0]['kept_bytes_per_target'] / 1000:.1f} kB")
        hours = sum(record["hours"][-1] for record in found) / len(found)
        cells += [f"{found[0]['parameters'] / 1e6:.1f} M", str(found[0]["updates"][-1]), f"{hours:.2f}"]
        rows.append([run.title, *cells])
    kept = ["kept for backward, per target"] if PARTS[part].memory else []
    header = ["", "best valid", "last valid", *columns, *kept, "parameters", "updates", "hours"]
    if not again:
        # Nothing overfits where text is seen once.
        header, rows = ["", "valid", *header[3:]], [[row[0], *row[2:]] for row in rows]
    return markdown(header, rows) if rows else ""


def missing_table(records: Sequence[Record]) -> str:
    """The runs that are not done, by part, with the hours of one core that they need."""
    rows, total = [], 0.0
    for part in PARTS:
        missing: dict[Run, list[int]] = {}
        for run in RUNS:
            seeds = [seed for seed in run.seeds if str(seed) not in of_run(records, run.full_name)]
            if run.part == part and seeds:
                missing[run] = seeds
        if missing:
            hours = sum(run.hours * len(seeds) for run, seeds in missing.items())
            names = (f"{run.name} ({', '.join(map(str, seeds))})" for run, seeds in missing.items())
            rows.append([f"`{part}`", ", ".join(names), f"{hours:.1f}"])
            total += hours
    return markdown(["part", "runs (seeds)", "hours"], [*rows, ["all", "", f"{total:.1f}"]])


def tables(records: Sequence[Record]) -> dict[str, str]:
    """All tables by name."""
    named = {f"claims of {name}": claims_table(records, paper) for paper, name in PAPERS.items()}
    named.update({f"runs of {part}": part_table(records, part) for part in PARTS})
    return {name: text for name, text in {**named, "not run": missing_table(records)}.items() if text}


def filled(page: str, named: Mapping[str, str]) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{named[found[2]]}\n", page)


def plotted(records: Sequence[Record]) -> list[Record]:
    """The rows of the figure: the paper's effect and ours, for each test that counts.

    "low" and "high" are the ends of the interval, None where nothing gives it; "pairs" and "paper" may be None, too.
    """
    rows = []
    for claim in CLAIMS:
        for test, found in tested(records, claim):
            if found and not test.get("void"):
                row: Record = {"label": f"{claim['about']} ({test['setting']})".replace("`", "")}
                row |= {"unit": claim.get("unit", "bits"), "pairs": found.pairs, "paper": claim.get("effect")}
                ends = (None, None) if isinf(found.resolution) else (round(found.low, 6), round(found.high, 6))
                rows.append({**row, "mean": round(found.mean, 6), "low": ends[0], "high": ends[1]})
    return rows


def draw(figure: Figure, rows: Sequence[Record]) -> None:
    """Rows of ``plotted``, with their intervals."""
    by_unit = {unit: [row for row in rows if row["unit"] == unit] for unit in ("bits", "per cent")}
    panels = figure.subplots(2, 1, height_ratios=[max(1, len(rows)) for rows in by_unit.values()])
    for axes, (unit, rows) in zip(panels, by_unit.items()):
        for at, row in enumerate(rows):
            mean, low, high, one = row["mean"], row["low"], row["high"], row["pairs"] == 1
            ends = None if low is None else [[mean - low], [high - mean]]
            style = {"fmt": "s" if one else "o", "color": "C7" if one else "C0", "linestyle": ""}
            # Full, if the interval of several pairs lies on one side.
            clear = not one and not low <= 0 <= high
            face = style["color"] if clear else "white"
            axes.errorbar([mean], [at], xerr=ends, capsize=2, markerfacecolor=face, **style)
            if row["paper"] is not None:
                axes.plot([row["paper"]], [at], "D", color="C3", markerfacecolor="white")
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=7)
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        what = "bits; below 0, the model that is named first is better" if unit == "bits" else "time or memory, %"
        report.finish_axes(axes, what, "", legend=False)


def write_figure(path: Path, records: Sequence[Record]) -> None:
    """Draw the effects into a PNG, and write their rows into its text."""
    rows = plotted(records)
    report.write_png(str(path), lambda figure: draw(figure, rows), 9, 9, {ROWS: json.dumps(rows)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables there instead of printing them")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the effects there")
    args = parser.parse_args()
    records = read(args.results)
    named = tables(records)
    if args.figure:
        write_figure(args.figure, records)
    if args.page:
        args.page.write_text(filled(args.page.read_text(encoding="utf-8"), named), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in named.items()))


if __name__ == "__main__":
    main()
