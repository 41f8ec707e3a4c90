"""A planted project: which bugs are noticed, that a campaign goes on where it ended, and what it leaves alone."""

import json
from pathlib import Path

import pytest

from tests.helpers.beside import library
from tests.mutants.table import TABLE

ROOT = Path(__file__).parents[2]

FILES = {
    "fairseq_ms/__init__.py": "",
    "fairseq_ms/windows.py": """\
def visible(distance: int | None, far: int) -> bool:
    return 0 <= distance < far


def rows(count: int, states: list[int]) -> list[int]:
    if count:
        return states[count:]
    return [min(len(states), 64)]
""",
    "preprocess/empty.py": "",
    "tests/test_windows.py": """\
import pathlib, time
import pytest
from fairseq_ms.windows import rows, visible

pathlib.Path("written").write_text("by a test")


def test_windows():
    assert [visible(distance, 2) for distance in (-1, 0, 1, 2, 3)] == [False, True, True, False, False]


@pytest.mark.slow
def test_rows():
    assert rows(1, [5, 7]) == [7]
    assert rows(0, [5, 7]) == [2]


def test_hanging():
    time.sleep(100)
""",
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\n",
}


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "planted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "planted" / name).write_text(text)
    return tmp_path / "planted"


@pytest.fixture(autouse=True)
def _cosmic_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(library("cosmic-ray", tmp_path))


def campaign(planted: Path, row: str = "tests/test_windows.py -k 'not hanging'") -> str:
    from tests.mutants.campaign import run

    return run(planted, {"fairseq_ms/windows.py": (row,)}, planted.parent / "mutants.jsonl", sample=50, seed=1)


def test_survivors_are_told_from_kills_and_the_tree_is_left_alone(planted: Path) -> None:
    printed = campaign(planted)
    assert {str(path.relative_to(planted)) for path in planted.rglob("*") if path.is_file()} == set(FILES)
    assert all((planted / name).read_text() == text for name, text in FILES.items())
    results = planted.parent / "mutants.jsonl"
    verdicts = dict(map(json.loads, results.read_text().splitlines()))
    # Both comparisons, the condition, the bound, both numbers and the minimum; an annotation is no mutant.
    assert len(verdicts) == 7
    for diff, (killer, _) in verdicts.items():
        (line,) = [line for line in diff.splitlines() if line.startswith("+ ")]
        test = "test_windows" if "distance" in line else "test_rows"
        assert killer == ("" if "min(" in line else f"tests/test_windows.py::{test}"), line
    assert "| all | 7 | 3 | 6 |" in printed
    assert printed.count("SURVIVED") == 1

    # A campaign that was ended goes on with what is left.
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:-1]))
    assert campaign(planted) == printed
    assert results.read_text().splitlines(keepends=True) == lines


def test_a_wrong_row_of_the_table_is_told_and_not_counted(planted: Path) -> None:
    (planted / "tests" / "test_broken.py").write_text("def test_broken():\n    assert False\n")
    with pytest.raises(SystemExit, match=r"^tests/test_broken.py fails without a mutant: .*::test_broken"):
        campaign(planted, row="tests/test_broken.py")
    assert not (planted.parent / "mutants.jsonl").read_text()


def test_what_hangs_is_ended_and_a_row_may_have_no_slow_test(planted: Path) -> None:
    from tests.mutants.campaign import failure

    assert failure(planted, "tests/test_windows.py -k hanging", "not slow", 5.0) == "timeout"
    assert failure(planted, "tests/test_windows.py -k hanging", "slow", 60.0) == ""


def test_the_table_names_files_that_there_are() -> None:
    words = [word for file, tests in TABLE.items() for part in (file, *tests) for word in part.split()]
    assert not [word for word in words if word.endswith(".py") and not (ROOT / word).is_file()]
