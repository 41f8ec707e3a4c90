"""The runs behind docs/papers/claims.md; what each of them trains, and how it is tested, is data, in runs.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("runs.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the runs of one paper, on one corpus, have in common.

    Attributes:
        about: which of the paper's experiments it stands for
        corpus: a name of `corpora.CORPORA`
        tokens: of an update
        epochs: over the corpus
        validations: of a run
        hours: of one core that a whole run takes, roughly
        train: command of a training; {examples}, {data}, {save}, {seed}, {updates}, {interval} (updates between two
            validations), {warmup} (a twentieth of the updates), {long_warmup} (a third), {preset}, {cpu} (`--cpu`, or
            nothing on a GPU), {hydra_cpu} (true or false) and the part's `values` are filled in
        test: command of a test, with {checkpoint}, and {lengths} of a column
        result: regular expression of what the test prints
        columns: of its tables: title, and what fills the test's {lengths}
        values: more that fills both commands
        memory: whether its claims are about memory, so that its runs say what a training step keeps
    """

    about: str
    corpus: str
    tokens: int
    epochs: int
    validations: int
    hours: float
    train: str
    test: str
    result: str
    columns: Mapping[str, str]
    values: Mapping[str, Any] = field(default_factory=dict)
    memory: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A row of a table, for each of its seeds.

    Attributes:
        full_name: part/name, of its folder and its results
        title: of its row
        preset: fills the training command's {preset}
        flags: further arguments of the training, with $fragments of runs.json
        columns: other ones than its part's; none where there is nothing to test
        share: of the corpus' updates
        after: the run of its part whose last checkpoint this one begins with, and whose hours count as its own
        seeds: a training for each
        cost: times the part's hours
    """

    full_name: str
    title: str
    preset: str = ""
    flags: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    share: float = 1.0
    after: str | None = None
    seeds: Sequence[int] = (1,)
    cost: float = 1.0

    @property
    def part(self) -> str:
        """A name of `PARTS`."""
        return self.full_name.partition("/")[0]

    @property
    def name(self) -> str:
        """Within its part."""
        return self.full_name.partition("/")[2]

    @property
    def hours(self) -> float:
        """Of one core, for one seed, roughly."""
        return PARTS[self.part].hours * self.share * self.cost


def _part(kind: str, **values: Any) -> Part:
    return Part(**{**_DATA["kinds"][kind], **values})


def _run(run: str, flags: str = "", **values: Any) -> Run:
    values = {"columns": PARTS[run.partition("/")[0]].columns, **values}
    return Run(full_name=run, flags=Template(flags).substitute(_DATA["fragments"]), **values)


PARTS = {name: _part(**values) for name, values in _DATA["parts"].items()}
# Most informative first, which is the order in which the driver takes them.
RUNS = [_run(**values) for values in _DATA["runs"]]
