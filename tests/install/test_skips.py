"""Where CI is set, a test that skips without a reason on the list fails the run."""

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT
from tests.helpers.forked import context, ended, print_to

WHOLE_FILE = "import pytest\npytest.importorskip('a_package_that_is_not_there', reason='no time today')\n"
UNLISTED = WHOLE_FILE.replace("pytest.i", "def test_a(): pytest.i")
LISTED = UNLISTED.replace("no time today", "needs a CUDA device")


def run_pytest(folder: Path, ci: str) -> None:
    """In a process that has the libraries already."""
    print_to(str(folder / "log"))
    os.environ["CI"] = ci
    os.chdir(folder)
    raise SystemExit(int(pytest.main(["-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)])))


@pytest.mark.parametrize(
    ("source", "ci", "code"),
    [(UNLISTED, "true", 1), (UNLISTED, "", 0), (LISTED, "true", 0), (WHOLE_FILE, "true", 1)],
)
def test_a_skip_without_a_listed_reason_fails_the_run_where_ci_is_set(source, ci, code, tmp_path):
    for name in ("conftest.py", "slow.txt"):
        shutil.copy(ROOT / "tests" / name, tmp_path / name)
    (tmp_path / "test_one.py").write_text(source, encoding="utf-8")
    codes = ended([context.Process(target=run_pytest, args=(tmp_path, ci))])
    printed = (tmp_path / "log").read_text()
    assert codes == [code], printed
    assert ("the run fails" in printed) == (code == 1)
