"""The records as a page of tables."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from benchmarks.gpu.rows import NUMBERS, OUTCOMES, Cell, Record, Row, Table


def report(tables: Sequence[Table], records: Mapping[str, Record], machine: Mapping[str, object]) -> str:
    """All tables in Markdown, with the rows that have a record; the others are counted."""
    counts = {outcome: sum(outcome in record for record in records.values()) for outcome in OUTCOMES}
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    minutes = sum(float(record["seconds"]) for record in records.values()) / 60.0
    lines = [
        "# Measured on a GPU",
        "",
        f"{machine['device']} with {machine['memory_gb']} GB, torch {machine['torch']}, Python {machine['python']}:",
        f"{minutes:.0f} minutes of measuring; rows with {said}." if said else "nothing measured yet.",
        "",
        "    python -m benchmarks.gpu      # or: make gpu",
        "",
        "Numbers in parentheses are the smallest and largest round. Memory is `torch.cuda.max_memory_allocated` of a",
        "forward and backward pass with weights and gradients, before the optimizer; a GB is 10^9 bytes. Models are in",
        "half precision throughout, as `--fp16` and `--bf16` run them.",
    ]
    if machine["quick"]:
        lines += ["", "These are tiny shapes: the numbers mean nothing."]
    begun = [table for table in tables if any(table.key(row) in records for row in table.rows)]
    for table in begun:
        lines += [
            "",
            f"## {table.title}",
            "",
            *textwrap.wrap(table.about, 120, break_on_hyphens=False),
            "",
            *_markdown(table, records),
        ]
    later = [f"{table.title} ({len(table.rows)})" for table in tables if table not in begun]
    if later:
        lines += [
            "",
            *textwrap.wrap(f"Tables not measured, with their rows: {'; '.join(later)}.", 120, break_on_hyphens=False),
        ]
    return "\n".join(lines) + "\n"


def _markdown(table: Table, records: Mapping[str, Record]) -> list[str]:
    columns = [column for key, heading in table.columns.items() for column in _columns(table, key, heading)]
    header = [*table.settings, *columns]
    lines = [_line(header), _line(["---"] * len(header))]
    measured = [row for row in table.rows if table.key(row) in records]
    for row in measured:
        record = records[table.key(row)]
        cells = _cells(table, row, record, records) if NUMBERS in record else [_why_not(record)]
        cells += [""] * (len(columns) - len(cells))
        lines.append(_line([*row.settings, *cells]))
    missing = len(table.rows) - len(measured)
    return lines + (["", f"Rows not measured: {missing} (`--list` names them)."] if missing else [])


def _columns(table: Table, key: str, heading: str) -> list[str]:
    return [heading, "ratio"] if key == table.compared else [heading]


def _cells(table: Table, row: Row, record: Record, records: Mapping[str, Record]) -> list[str]:
    cells: list[str] = []
    for key in table.columns:
        value = record[NUMBERS].get(key)
        cells.append(_text(value))
        if key == table.compared:
            base, own = _baseline(table, row, records, key), _middle(value)
            cells.append("" if base is None or own is None else f"{own / base:.3f}")
    return cells


def _baseline(table: Table, row: Row, records: Mapping[str, Record], key: str) -> float | None:
    """The number that a row's is divided by, if it has been measured."""
    for other in table.rows:
        if other.group == row.group and other.settings[0] == table.baseline:
            return _middle(records.get(table.key(other), {}).get(NUMBERS, {}).get(key))
    return None


def _middle(value: Cell | None) -> float | None:
    if isinstance(value, list):
        return value[0]
    return None if value is None or isinstance(value, str) else float(value)


def _why_not(record: Record) -> str:
    """In a few words; the file of records has the whole message."""
    for outcome in OUTCOMES:
        if outcome in record and outcome != NUMBERS:
            return outcome if outcome == "does not fit" else f"{outcome}: {record[outcome]}"
    raise KeyError(f"a record has one of {OUTCOMES}: got {record}")


def _text(value: Cell | None) -> str:
    if isinstance(value, list):
        median, least, most = (_number(number) for number in value)
        return f"{median} ({least} .. {most})"
    return "" if value is None else value if isinstance(value, str) else _number(float(value))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
