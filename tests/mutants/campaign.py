"""Mutants of the files that hold masks, windows, blocks, memories and streams, and the table of those that tests kill.

make mutants                                all of them
python -m tests.mutants.campaign --only streams --sample 40 --seed 7
"""

from __future__ import annotations

import argparse
import compileall
import difflib
import itertools
import json
import py_compile
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from tqdm import tqdm

from tests.helpers.cli import ROOT
from tests.mutants.drawing import draw
from tests.mutants.table import SAMPLE, SEED, TABLE

# What tests read of the tree, as far as there is.
COPIED = ("fairseq_ms", "preprocess", "tests", "pyproject.toml")
# `make test` takes the first, `make test-all` both.
MARKS = ("not slow", "slow")


def failure(tree: Path, arguments: str, mark: str, timeout: float) -> str:
    """The first test that fails, or nothing; taking longer than ``timeout`` seconds is a failure."""
    command = f"env -C {tree} {sys.executable} -m pytest -x -q -p no:cacheprovider {arguments} -m '{mark}'"
    outcome, printed = run_tests(command, timeout)
    if outcome is TestOutcome.SURVIVED or re.search(r"^(no tests ran|\d+ deselected) in", printed, re.MULTILINE):
        return ""
    return (re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE) or printed.splitlines()[-1:] or ["?"])[0]


def copied(root: Path, tree: Path) -> None:
    """Copy the tree, compiled once for all runs."""
    for source in (root / name for name in COPIED):
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tree / source.name)
    # A mutant is told by what is in the file and not by when it was written.
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(tree, quiet=2, force=True, invalidation_mode=checked)


def killer(tree: Path, path: str, source: str, rows: Sequence[str], seconds: dict[tuple[str, str], float]) -> list[str]:
    """The first test that fails where a file of the tree reads ``source``, and its mark; both are empty for a survivor.

    Before the first mutant, tests must pass; how long they took is written to ``seconds``.
    """
    for mark, row in itertools.product(MARKS, rows):
        if (mark, row) not in seconds:
            began = time.monotonic()
            if failed := failure(tree, row, mark, 600):
                raise SystemExit(f"{row} fails without a mutant: {failed}")
            seconds[mark, row] = time.monotonic() - began
        original = (tree / path).read_text()
        (tree / path).write_text(source)
        failed = failure(tree, row, mark, 5 * seconds[mark, row] + 30)
        (tree / path).write_text(original)
        if failed:
            return [failed, mark]
    return ["", ""]


def run(root: Path, table: Mapping[str, Sequence[str]], results: Path, sample: int, seed: int) -> str:
    """Judge all mutants that ``results`` does not know yet; the report."""
    results.parent.mkdir(parents=True, exist_ok=True)
    results.touch()
    known: dict[str, list[str]] = dict(map(json.loads, results.read_text().splitlines()))
    drawn = {}
    for path in table:
        original = (root / path).read_text()
        for source in draw(original, sample, random.Random(f"{seed} {path}")):
            lines = original.splitlines(keepends=True), source.splitlines(keepends=True)
            drawn["".join(difflib.unified_diff(*lines, path, path, n=1))] = path, source
    seconds: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as tree, results.open("a") as file:
        copied(root, Path(tree))
        for diff in tqdm([diff for diff in drawn if diff not in known], unit="mutant", smoothing=0):
            path, source = drawn[diff]
            known[diff] = killer(Path(tree), path, source, table[path], seconds)
            # A line at a time, so that a campaign that is ended goes on from there.
            print(json.dumps([diff, known[diff]]), file=file, flush=True)
    marks = {path: [known[diff][1] for diff in drawn if drawn[diff][0] == path] for path in table}
    rows = ["| file | mutants | `make test` | `make test-all` |", "| --- | --- | --- | --- |"]
    for path, found in {**marks, "all": list(itertools.chain(*marks.values()))}.items():
        rows.append(f"| {path} | {len(found)} | {found.count(MARKS[0])} | {len(found) - found.count('')} |")
    return "\n".join([*rows, *(f"\nSURVIVED\n{diff}" for diff in drawn if not known[diff][0])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"mutants of a file (default: {SAMPLE})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the sample (default: {SEED})")
    args = parser.parse_args()
    table = {path: rows for path, rows in TABLE.items() if args.only in path}
    print(run(ROOT, table, ROOT / "build" / "mutants.jsonl", args.sample, args.seed))


if __name__ == "__main__":
    main()
