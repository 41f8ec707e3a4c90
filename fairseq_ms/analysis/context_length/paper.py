"""The context lengths n_c that Transformer-QL's Tables 1, 3 and 5 print, and ours for the same models."""

from __future__ import annotations

from typing import NamedTuple

from fairseq_ms.analysis.context_length import formula
from fairseq_ms.analysis.context_length.formula import ContextLength


class Printed(NamedTuple):
    """A model of a table, its n_s, n_m and n_cm, and the n_c beside it."""

    table: str
    arch: str
    segment: int
    memory: int
    compressed: int
    context: int


TABLES = [
    Printed("Table 1", "transformer_xl", 4, 12, 0, 98),
    Printed("Table 1", "compressive_transformer", 4, 6, 6, 146),
    Printed("Table 1", "transformer_ql", 4, 12, 0, 138),
    Printed("Table 1", "transformer_xl", 8, 24, 0, 196),
    Printed("Table 1", "compressive_transformer", 8, 12, 12, 292),
    Printed("Table 1", "transformer_ql", 8, 24, 0, 276),
    Printed("Table 3", "transformer_xl", 8, 8, 0, 68),
    Printed("Table 3", "transformer_ql", 8, 8, 0, 100),
    Printed("Table 3", "transformer_xl", 16, 16, 0, 136),
    Printed("Table 3", "transformer_ql", 16, 16, 0, 200),
    Printed("Table 3", "transformer_xl", 2, 30, 0, 241),
    Printed("Table 3", "transformer_ql", 2, 30, 0, 332),
    Printed("Table 5", "transformer_ql", 16, 0, 0, 8),
    Printed("Table 5", "transformer_ql", 32, 0, 0, 16),
    Printed("Table 5", "transformer_ql", 64, 0, 0, 32),
    Printed("Table 5", "transformer_ql", 128, 0, 0, 64),
]


def by_formula(row: Printed) -> ContextLength:
    """Eight layers each; Transformer-QL's are three at 1x, three at 2x and two for the output."""
    if row.arch == "transformer_ql":
        return formula.transformer_ql(row.segment, row.memory, {1: 3, 2: 3}, 2)
    if row.compressed:
        return formula.compressive_transformer(row.segment, row.memory, row.compressed, 2, 8)
    return formula.transformer_xl(row.segment, row.memory, 8)


def flags(row: Printed) -> list[str]:
    """The model's flags, with fewer dimensions than the paper's, which do not matter to what depends on what."""
    given = ["--arch", row.arch, "--tokens-per-sample", str(row.segment), "--mem-len", str(row.memory)]
    if row.compressed:
        given += ["--compressed-mem-len", str(row.compressed)]
    return [*given, "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2"]
