"""Mutants of the files that hold masks, windows, blocks, memories and streams, and the table of those that tests kill.

make mutants                                all of them
python -m tests.mutants.campaign --only streams --sample 40 --seed 7
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import difflib
import importlib
import itertools
import json
import multiprocessing
import os
import py_compile
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tqdm import tqdm

from tests.helpers.cli import ROOT
from tests.mutants.drawing import draw
from tests.mutants.table import SAMPLE, SEED, TABLE

# What every run would import first, and takes seconds for; and what tests read of the tree, as far as there is.
LIBRARIES = ("torch._dynamo", "fairseq.trainer", "fairseq_cli.train", "fairseq.tasks.language_modeling")
COPIED = ("fairseq_ms", "preprocess", "tests", "pyproject.toml")
# `make test` takes the first, `make test-all` both.
MARKS = ("not slow", "slow")
_fork = multiprocessing.get_context("fork")


def run_tests(tree: Path, arguments: str, mark: str, timeout: float) -> str:
    """Run pytest in a forked process up to the first failure; the test that failed, or nothing.

    Taking longer than ``timeout`` seconds is a failure, and what the tests have started ends with them.
    """
    log = tree.parent / "log"
    process = _fork.Process(target=_pytest, args=(tree, log, [*shlex.split(arguments), "-m", mark]))
    process.start()
    try:
        process.join(timeout)
        hangs = process.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if hangs:
        return "too long"
    if process.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    printed = log.read_text(errors="replace")
    return (re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE) or printed.split("\n")[-2:-1] or ["?"])[0]


def _pytest(tree: Path, log: Path, arguments: list[str]) -> None:
    """In a forked process: become one that knows the copy and not the tree it was copied from."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w")
    os.chdir(tree)
    paths = [str(tree), str(tree / "preprocess")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    own = {path.stem for path in (*tree.iterdir(), *tree.glob("preprocess/*"))}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]
    # Processes that tests spawn would otherwise begin with the campaign.
    sys.modules["__main__"] = types.ModuleType("__main__")
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={tree}", *arguments])
    sys.stdout.flush()
    os._exit(int(code))


def copied(root: Path, place: Path) -> Path:
    """A copy of the tree, compiled once for all runs."""
    (place / "tree").mkdir()
    for source in (root / name for name in COPIED):
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, place / "tree" / source.name)
    # A mutant is told by what is in the file and not by when it was written.
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(place / "tree", quiet=2, force=True, invalidation_mode=checked)
    return place / "tree"


def killer(tree: Path, path: str, source: str, rows: Sequence[str], seconds: dict[tuple[str, str], float]) -> list[str]:
    """The first test that fails where a file of the tree reads ``source``, and its mark; both are empty for a survivor.

    Before the first mutant, tests must pass; how long they took is written to ``seconds``.
    """
    for mark, row in itertools.product(MARKS, rows):
        if (mark, row) not in seconds:
            began = time.monotonic()
            if failed := run_tests(tree, row, mark, 600):
                raise SystemExit(f"{row} fails without a mutant: {failed}")
            seconds[mark, row] = time.monotonic() - began
        original = (tree / path).read_text()
        (tree / path).write_text(source)
        failed = run_tests(tree, row, mark, 5 * seconds[mark, row] + 30)
        (tree / path).write_text(original)
        if failed:
            return [failed, mark]
    return ["", ""]


def run(root: Path, table: Mapping[str, Sequence[str]], results: Path, args: argparse.Namespace) -> str:
    """Judge all mutants that ``results`` does not know yet, and with ``args.again`` its survivors too; the report."""
    results.parent.mkdir(parents=True, exist_ok=True)
    results.touch()
    known: dict[str, list[str]] = dict(map(json.loads, results.read_text().splitlines()))
    drawn = {}
    for path in table:
        original = (root / path).read_text()
        for source in draw(original, args.sample, random.Random(f"{args.seed} {path}")):
            lines = original.splitlines(keepends=True), source.splitlines(keepends=True)
            drawn["".join(difflib.unified_diff(*lines, path, path, n=1))] = path, source
    left = [diff for diff in drawn if diff not in known or (args.again and not known[diff][0])]
    seconds: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as place, results.open("a") as file:
        tree = copied(root, Path(place))
        for diff in tqdm(left, unit="mutant", smoothing=0):
            path, source = drawn[diff]
            known[diff] = killer(tree, path, source, table[path], seconds)
            # A line at a time, so that a campaign that is ended goes on from there.
            print(json.dumps([diff, known[diff]]), file=file, flush=True)
    return report({path: [known[diff][1] for diff in drawn if drawn[diff][0] == path] for path in table}) + "".join(
        f"\nSURVIVED\n{diff}" for diff in drawn if not known[diff][0]
    )


def report(marks: dict[str, list[str]]) -> str:
    """How many mutants of each file were noticed by the tests of `make test`, and by all."""
    lines = ["| file | mutants | `make test` | `make test-all` |", "| --- | --- | --- | --- |"]
    for path, found in {**marks, "all": list(itertools.chain(*marks.values()))}.items():
        lines.append(f"| {path} | {len(found)} | {found.count(MARKS[0])} | {len(found) - found.count('')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"mutants of a file (default: {SAMPLE})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the sample (default: {SEED})")
    parser.add_argument("--again", action="store_true", help="test the survivors of the results once more")
    args = parser.parse_args()
    # Ended by a signal, it takes the tests that are running with it, and leaves no copy of the tree behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for library in LIBRARIES:
        importlib.import_module(library)
    table = {path: rows for path, rows in TABLE.items() if args.only in path}
    print(run(ROOT, table, ROOT / "build" / "mutants.jsonl", args))


if __name__ == "__main__":
    main()
