"""A copy of the source tree in which mutants are tested, each by a process forked from one that has the libraries."""

from __future__ import annotations

import compileall
import contextlib
import multiprocessing
import os
import py_compile
import re
import shutil
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# What tests read of the tree, as far as there is.
COPIED = ("fairseq_ms", "preprocess", "tests", "pyproject.toml")
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Run:
    """What came of running some tests: whether all passed, what failed, and in how many seconds."""

    passed: bool
    failure: str
    seconds: float


class Workshop:
    """Runs tests of a copy of a source tree; nothing outside ``place`` is written.

    Args:
        root: the source tree
        place: an empty folder for the copy
    """

    def __init__(self, root: Path, place: Path) -> None:
        self.tree = place / "tree"
        self.log = place / "log"
        self.tree.mkdir()
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, self.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy(root / name, self.tree / name)
        # Compiled once for all runs, and told from a mutant by what is in the file and not by when it was written.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.tree, quiet=2, invalidation_mode=checked)

    @contextlib.contextmanager
    def changed(self, path: str, source: str) -> Iterator[None]:
        """Within, a file of the copy has another text."""
        file = self.tree / path
        original = file.read_bytes()
        file.write_text(source)
        try:
            yield
        finally:
            file.write_bytes(original)

    def run(self, arguments: Sequence[str], timeout: float) -> Run:
        """Run pytest up to the first failure; taking longer than ``timeout`` seconds is one."""
        began = time.monotonic()
        process = _fork.Process(target=_pytest, args=(self.tree, self.log, list(arguments)))
        process.start()
        try:
            process.join(timeout)
            hangs = process.is_alive()
        finally:
            # Whatever the tests have started goes with them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        seconds = time.monotonic() - began
        if hangs:
            return Run(False, "too long", seconds)
        if process.exitcode == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise ValueError(f"no tests: {' '.join(arguments)}")
        return Run(process.exitcode == 0, _failure(self.log) if process.exitcode else "", seconds)


def _pytest(tree: Path, log: Path, arguments: list[str]) -> None:
    """In a forked process: become one that knows the copy and not the tree it was copied from."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
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


def _failure(log: Path) -> str:
    """The test that failed, or what ended the run before any test."""
    printed = log.read_text(errors="replace")
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE) or printed.split("\n")[-2:-1]
    return found[0] if found else "no output"
