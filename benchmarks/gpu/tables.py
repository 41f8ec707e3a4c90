"""All tables, in the order of the report."""

from __future__ import annotations

from benchmarks.gpu import device_tests, generation, hierarchical, retina, streaming, train_mem, training
from benchmarks.gpu.rows import Table

MODULES = (device_tests, train_mem, training, generation, retina, streaming, hierarchical)


def tables(quick: bool) -> list[Table]:
    """With ``quick``, of tiny shapes."""
    found = [table for module in MODULES for table in module.tables(quick)]
    keys = [table.key(row) for table in found for row in table.rows]
    assert len(set(keys)) == len(keys), sorted(key for key in keys if keys.count(key) > 1)
    return found
