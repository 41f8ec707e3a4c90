"""Where CI is set, a test that skips without a reason on the list fails the run."""

import shutil
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT

WHOLE_FILE = "import pytest\npytest.importorskip('a_package_that_is_not_there', reason='no time today')\n"
UNLISTED = WHOLE_FILE.replace("pytest.i", "def test_a(): pytest.i")
LISTED = UNLISTED.replace("no time today", "needs a CUDA device")


@pytest.mark.parametrize(
    ("source", "ci", "code"),
    [(UNLISTED, "true", 1), (UNLISTED, "", 0), (LISTED, "true", 0), (WHOLE_FILE, "true", 1)],
)
def test_a_skip_without_a_listed_reason_fails_the_run_where_ci_is_set(source, ci, code, tmp_path):
    for name in ("conftest.py", "slow.txt"):
        shutil.copy(ROOT / "tests" / name, tmp_path / name)
    (tmp_path / "test_one.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={"PATH": "", "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("the run fails" in done.stdout) == (code == 1)
