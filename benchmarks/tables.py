"""All tables, by what their numbers are worth: whoever has a device for ten minutes learns the most from the first."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import characters, compiled, generate, growth, haed, retina, streaming, train_mem, training
from benchmarks.table import Options, Row, Table

MODULES = (generate, training, compiled, retina, growth, train_mem, streaming, haed, characters)
# Of these, the more valuable precision comes before anything else.
FIRST = ("generate", "training", "compiled", "retina", "growth")


def tables(options: Options) -> dict[str, Table]:
    """Every table by its name."""
    found = {table.name: table for module in MODULES for table in module.tables(options)}
    keys = [table.key(row) for table in found.values() for row in table.rows]
    assert len(set(keys)) == len(keys), sorted(key for key in keys if keys.count(key) > 1)
    return found


def by_value(chosen: list[Table], options: Options) -> Iterator[tuple[Table, list[Row]]]:
    """The cohorts of these tables, the most valuable first."""
    cohorts = [(table, rows) for table in chosen for rows in table.cohorts().values()]
    cohorts.sort(key=lambda cohort: cohort[0].name not in FIRST)
    cohorts.sort(key=lambda cohort: cohort[1][0].settings[-1] in options.precisions[1:])
    return iter(cohorts)
