"""Mutants of the files that hold masks, windows, blocks, memories and streams, and the table of those that tests kill.

make mutants                                all of them
python -m tests.mutants.campaign --only streams --sample 40 --seed 7
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.helpers.cli import ROOT
from tests.mutants.drawing import Mutant, draw
from tests.mutants.table import SAMPLE, SEED, TABLE, Stages
from tests.mutants.workshop import Workshop

# What every run would import first, and takes seconds for.
LIBRARIES = ("torch._dynamo", "fairseq.trainer", "fairseq_cli.train", "fairseq.tasks.language_modeling")
# How many times as long as the tests of the unchanged file, and how many seconds more, those of a mutant may take.
_FACTOR, _MORE = 5, 30


@dataclasses.dataclass
class Verdict:
    """What became of a mutant; ``killer`` is the test that failed first, and empty for a survivor."""

    key: str
    path: str
    operator: str
    diff: str
    killer: str


class WrongTable(Exception):
    """A row whose tests fail without a mutant, or pass without the file."""


class Campaign:
    """Tests mutants one after the other, each by the stages of its file until a test fails.

    Args:
        workshop: where they are tested
        table: the stages of tests by file
    """

    def __init__(self, workshop: Workshop, table: Mapping[str, Stages]) -> None:
        self.workshop = workshop
        self.table = table
        self._seconds: dict[tuple[str, ...], float] = {}

    def check(self, path: str) -> None:
        """Raise WrongTable unless the tests pass, and fail without the file."""
        for stage in self.table[path]:
            if stage not in self._seconds:
                run = self.workshop.run(stage, timeout=600)
                if not run.passed:
                    raise WrongTable(f"{' '.join(stage)} fails without a mutant: {run.failure}")
                self._seconds[stage] = run.seconds
            with self.workshop.changed(path, "raise RuntimeError('there is no such file')\n"):
                if self.workshop.run(stage, timeout=600).passed:
                    raise WrongTable(f"{' '.join(stage)} passes without {path}")

    def judge(self, mutant: Mutant) -> Verdict:
        killer = ""
        with self.workshop.changed(mutant.path, mutant.source):
            for stage in self.table[mutant.path]:
                run = self.workshop.run(stage, _FACTOR * self._seconds[stage] + _MORE)
                if not run.passed:
                    killer = run.failure
                    break
        return Verdict(mutant.key, mutant.path, mutant.operator, mutant.diff, killer)


def drawn(root: Path, table: Mapping[str, Stages], sample: int, seed: int) -> Iterator[Mutant]:
    """The mutants of every file; those of one file do not depend on the others."""
    for path in table:
        yield from draw(path, (root / path).read_text(), sample, random.Random(f"{seed} {path}"))


def run(
    root: Path,
    table: Mapping[str, Stages],
    results: Path,
    sample: int,
    seed: int,
    again: bool = False,
    libraries: Sequence[str] = LIBRARIES,
) -> list[Verdict]:
    """Judge all mutants that ``results`` does not know yet, and with ``again`` its survivors too; returns all."""
    known = {}
    if results.exists():
        known = {key: Verdict(**row) for key, row in (_row(line) for line in results.read_text().splitlines())}
    mutants = list(drawn(root, table, sample, seed))
    left = [each for each in mutants if each.key not in known or (again and not known[each.key].killer)]
    for library in libraries if left else ():
        importlib.import_module(library)
    results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place, results.open("a") as file:
        campaign = Campaign(Workshop(root, Path(place)), table)
        checked: set[str] = set()
        for mutant in tqdm(left, unit="mutant", smoothing=0):
            if mutant.path not in checked:
                campaign.check(mutant.path)
                checked.add(mutant.path)
            verdict = known[mutant.key] = campaign.judge(mutant)
            # A line at a time, so that a campaign that is ended goes on from there.
            file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
            file.flush()
    return [known[mutant.key] for mutant in mutants]


def _row(line: str) -> tuple[str, dict[str, Any]]:
    row = json.loads(line)
    return row["key"], row


def report(verdicts: Sequence[Verdict]) -> str:
    """The score by file, and the survivors."""
    rows: dict[str, list[int]] = {}
    for verdict in verdicts:
        counts = rows.setdefault(verdict.path, [0, 0])
        counts[0] += 1
        counts[1] += bool(verdict.killer)
    rows["all"] = [sum(column) for column in zip(*rows.values())]
    width = max(map(len, rows))
    lines = [f"| {'file':{width}} | mutants | killed | score |", f"| {'-' * width} | ------- | ------ | ----- |"]
    lines += [f"| {path:{width}} | {n:7} | {k:6} | {100 * k / max(n, 1):4.0f}% |" for path, (n, k) in rows.items()]
    survivors = [f"\nSURVIVED ({v.operator}):\n{v.diff}" for v in verdicts if not v.killer]
    return "\n".join([*lines, *survivors])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"mutants of a file (default: {SAMPLE})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the sample (default: {SEED})")
    parser.add_argument("--again", action="store_true", help="test the survivors of the results once more")
    results = ROOT / "build" / "mutants.jsonl"
    parser.add_argument("--results", type=Path, default=results, help="a campaign that was ended goes on from here")
    args = parser.parse_args()
    # Ended by a signal, it takes the tests that are running with it, and leaves no copy of the tree behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    table = {path: stages for path, stages in TABLE.items() if args.only in path}
    print(report(run(ROOT, table, args.results, args.sample, args.seed, args.again)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
