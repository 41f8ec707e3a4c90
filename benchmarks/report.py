"""The records as Markdown: a table on the terminal as its rows are measured, and a page of all."""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.table import NUMBERS, OUTCOMES, TIME, Cell, Record, Row, Settings, Table

PARITY = "parity"


def page(tables: Sequence[Table], records: Mapping[str, Record], machine: Mapping[str, object]) -> str:
    """All tables in Markdown, with the rows that have a record; the others are counted."""
    rows = [table.key(row) for table in tables for row in table.rows]
    known = [records[key] for key in rows if key in records]
    counts = {outcome: sum(outcome in record for record in known) for outcome in OUTCOMES}
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    minutes = sum(float(record["seconds"]) for record in known) / 60.0
    on_gpu = "threads" not in machine
    how = "--device cuda" if on_gpu else f"--threads {machine['threads']}"
    memory = (
        "Memory is `torch.cuda.max_memory_allocated` of a forward and backward pass with weights and gradients, before "
        "the optimizer; a GB is 10^9 bytes. Models are in half precision throughout, as `--fp16` and `--bf16` run them."
        if on_gpu
        else "A peak is by how much the process grows in a forward and backward pass, gradients included."
    )
    about = "Numbers in parentheses are the smallest and largest round; ratios are of rounds in turns, where they have "
    lines = [
        f"# Measured on a {'GPU' if on_gpu else 'CPU'}",
        "",
        f"{machine['device']} with {machine['memory_gb']} GB, torch {machine['torch']}, Python {machine['python']}:",
        f"{minutes:.0f} minutes of measuring; rows with {said}." if said else "nothing measured yet.",
        *wrapped(f"Measured {machine['measured']}." if "measured" in machine else ""),
        "",
        f"    fairseq-ms bench all {how} --report FILE{'      # or: make gpu' if on_gpu else ''}",
        "",
        *wrapped(f"{about}such numbers, too. {memory}"),
    ]
    if machine["quick"]:
        lines += ["", "These are tiny shapes: the numbers mean nothing."]
    begun = [table for table in tables if any(table.key(row) in records for row in table.rows)]
    for table in begun:
        lines += ["", f"## {table.title}", "", *wrapped(f"{table.about} {_measured_on(table, records, machine)}"), ""]
        if PARITY in records.get(table.name, {}):
            lines += [*wrapped(f"Checked before: {records[table.name][PARITY]}."), ""]
        lines += markdown(table, table.rows, records)
        missing = sum(table.key(row) not in records for row in table.rows)
        lines += ["", f"Rows not measured: {missing} (`--list` names them)."] if missing else []
    later = [f"{table.title} ({len(table.rows)})" for table in tables if table not in begun]
    lines += ["", *wrapped(f"Tables not measured, with their rows: {'; '.join(later)}.")] if later else []
    return "\n".join(lines) + "\n"


def _measured_on(table: Table, records: Mapping[str, Record], machine: Mapping[str, object]) -> str:
    """Card, version and days of a table's rows."""
    times = sorted(float(r["together"]) for row in table.rows if "together" in (r := records.get(table.key(row), {})))
    days = dict.fromkeys(time.strftime("%Y-%m-%d", time.gmtime(at)) for at in times[:: max(1, len(times) - 1)])
    return ", ".join([f"{machine['device']}", f"torch {machine['torch']}", *[" to ".join(days)] * bool(days)]) + "."


def markdown(table: Table, rows: Sequence[Row], records: Mapping[str, Record]) -> list[str]:
    """A table of those of these rows that have a record."""
    ratios = [f"ratio {heading}" for heading in table.ratios]
    columns = [c for key, heading in table.columns.items() for c in [heading, *(ratios if key == TIME else [])]]
    header = [*table.settings, *columns]
    lines = []
    for row in rows:
        record = records.get(table.key(row))
        if record is not None:
            cells = _cells(table, row, records) if NUMBERS in record else [_why_not(record)]
            lines.append([*row.settings, *cells, *[""] * (len(columns) - len(cells))])
    return table_of(header, lines)


def _cells(table: Table, row: Row, records: Mapping[str, Record]) -> list[str]:
    found = records[table.key(row)][NUMBERS]
    cells: list[str] = []
    for key in table.columns:
        cells.append(_text(found.get(key)))
        if key == TIME:
            cells += [_ratio(table, row.settings, base, records) for base in table.ratios.values()]
    return cells


def _ratio(
    table: Table, settings: Settings, base: Callable[[Settings], Settings], records: Mapping[str, Record]
) -> str:
    """A row's time divided by another's, round by round where they took turns, else the ratio of their medians."""
    if base(settings) == settings:
        return "1"
    one, other = (records.get(" | ".join((table.name, *s)), {}) for s in (settings, base(settings)))
    ours, theirs = (record.get(NUMBERS, {}).get(TIME) for record in (one, other))
    if ours is None or theirs is None:
        return ""
    if one.get("together") is None or one["together"] != other.get("together"):
        return f"{statistics.median(ours) / statistics.median(theirs):.3f}"
    rounds = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(rounds):.3f} ({min(rounds):.3f} .. {max(rounds):.3f})"


def _why_not(record: Record) -> str:
    """In a few words; the file of records has the whole message."""
    (outcome,) = (outcome for outcome in OUTCOMES if outcome in record)
    return outcome if outcome == "does not fit" else f"{outcome}: {record[outcome]}"


def _text(value: Cell | None) -> str:
    if isinstance(value, list):
        return f"{_number(statistics.median(value))} ({_number(min(value))} .. {_number(max(value))})"
    return "" if value is None else value if isinstance(value, str) else _number(float(value))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def table_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False)
