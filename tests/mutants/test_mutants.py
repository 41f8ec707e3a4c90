"""A planted project: which bugs are noticed, that a campaign goes on where it ended, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.beside import library
from tests.helpers.cli import run_cli

SOURCE = '''\
"""What no test looks at is how many rows there are at most."""


def visible(distance: int | None, far: int) -> bool:
    return 0 <= distance < far


def rows(count: int) -> int:
    return min(count, 64)
'''
TESTS = """\
from pathlib import Path

from fairseq_ms.windows import rows, visible

Path("written").write_text("by a test")


def test_windows():
    assert [visible(distance, 2) for distance in (-1, 0, 1, 2, 3)] == [False, True, True, False, False]


def test_rows():
    assert rows(3) == 3
"""
WINDOWS = "fairseq_ms/windows.py"
TABLE = {WINDOWS: [["tests/test_windows.py", "-k", "windows and not rows"], ["tests/test_windows.py"]]}
PROGRAM = """
import json, sys
from pathlib import Path
from tests.mutants import campaign

root, results, again, table = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "again", json.loads(sys.argv[4])
table = {path: tuple(map(tuple, stages)) for path, stages in table.items()}
verdicts = campaign.run(root, table, results, sample=50, seed=1, again=again, libraries=())
print(campaign.report(verdicts))
"""


@pytest.fixture(scope="module")
def cosmic_ray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library("cosmic-ray", tmp_path_factory.mktemp("beside"))


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    for name, text in ((WINDOWS, SOURCE), ("tests/test_windows.py", TESTS), ("pyproject.toml", "[project]\n")):
        file = tmp_path / "planted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if file.parent.name in ("fairseq_ms", "tests"):
            (file.parent / "__init__.py").touch()
    return tmp_path / "planted"


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_survivors_are_told_from_kills_and_the_tree_is_left_alone(planted: Path, cosmic_ray: Path) -> None:
    results = planted.parent / "results" / "mutants.jsonl"
    before = contents(planted)

    def campaign(again: str = "") -> str:
        command = ("python", "-c", PROGRAM, planted, results, again, json.dumps(TABLE))
        return run_cli(*command, env={"PYTHONPATH": str(cosmic_ray)}).stdout

    printed = campaign()
    assert contents(planted) == before
    verdicts: list[dict[str, Any]] = [json.loads(line) for line in results.read_text().splitlines()]
    killers = {changed_line(verdict["diff"]): verdict["killer"] for verdict in verdicts}
    # Both comparisons, both numbers and the minimum; an annotation is nothing that a test could notice.
    assert len(killers) == len(verdicts) == 5
    for line, killer in killers.items():
        test = "test_windows" if "distance" in line else "test_rows" if "max" in line else ""
        assert killer == (test and f"tests/test_windows.py::{test}"), line
    assert [line.split() for line in printed.splitlines() if line.startswith("| all")] == [
        ["|", "all", "|", "5", "|", "4", "|", "80%", "|"]
    ]
    (survivor,) = [line for line, killer in killers.items() if not killer]
    assert f"\n+{survivor}\n" in printed

    # A campaign that was ended goes on with what is left, and tests survivors once more only when it is asked to.
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:3]))
    assert campaign() == printed
    assert results.read_text().splitlines(keepends=True) == lines
    assert campaign("again") == printed
    added = [json.loads(line) for line in results.read_text().splitlines()[len(lines) :]]
    assert [changed_line(verdict["diff"]) for verdict in added] == [survivor]


def changed_line(diff: str) -> str:
    (line,) = [line[1:] for line in diff.splitlines() if line.startswith("+ ")]
    return line


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (["tests/test_others.py"], "passes without fairseq_ms/windows.py"),
        (["tests/test_others.py", "-k", "nothing"], "no tests: tests/test_others.py -k nothing"),
        (["tests/test_broken.py"], "fails without a mutant: tests/test_broken.py::test_broken"),
    ],
)
def test_a_wrong_row_of_the_table_is_told_and_not_counted(
    stage: list[str], sentence: str, planted: Path, cosmic_ray: Path
) -> None:
    (planted / "tests" / "test_others.py").write_text("def test_others():\n    assert True\n")
    (planted / "tests" / "test_broken.py").write_text("def test_broken():\n    assert False\n")
    results = planted.parent / "mutants.jsonl"
    command = ("python", "-c", PROGRAM, planted, results, "", json.dumps({WINDOWS: [stage]}))
    done = run_cli(*command, env={"PYTHONPATH": str(cosmic_ray)}, check=False)
    assert done.returncode == 1
    assert sentence in done.stderr.splitlines()[-1]
    assert not results.read_text()


def test_what_hangs_is_ended_with_everything_it_has_started(planted: Path, cosmic_ray: Path) -> None:
    (planted / "tests" / "test_hanging.py").write_text(
        "import subprocess, time\n\n\ndef test_hanging():\n"
        "    beating = 'while sleep 0.1; do date > ../beat; done'\n"
        "    subprocess.Popen(['sh', '-c', beating])\n    time.sleep(100)\n"
    )
    program = """
import sys, time
from pathlib import Path
from tests.mutants.workshop import Workshop

place = Path(sys.argv[2])
run = Workshop(Path(sys.argv[1]), place).run(["tests/test_hanging.py"], timeout=4.0)
assert not run.passed and run.failure == "too long", run
beat = place / "beat"
beat.unlink()
time.sleep(0.5)
assert not beat.exists()
"""
    place = planted.parent / "place"
    place.mkdir()
    run_cli("python", "-c", program, planted, place, env={"PYTHONPATH": str(cosmic_ray)}, timeout=60.0)


def test_the_operators_of_our_own_do_what_their_examples_say(cosmic_ray: Path) -> None:
    program = """
from cosmic_ray.mutating import mutate_code
from tests.mutants.operators import DropBound, SwapName

examples = [(operator, example) for operator in (DropBound, SwapName) for example in operator.examples()]
for operator, example in examples:
    found = mutate_code(example.pre_mutation_code, operator(), example.occurrence)
    assert found == example.post_mutation_code, found
assert len(examples) == 4
"""
    run_cli("python", "-c", program, env={"PYTHONPATH": str(cosmic_ray)})
