"""The demo, shortened: every step of it runs and prints what it promises."""

import re
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT, run_cli

DEMO = ROOT / "user_dir_examples" / "demo"


def test_a_killed_training_is_said_to_be_killed_and_to_go_on(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run as demo
kill = "import os, signal; print('a last line', flush=True); os.kill(os.getpid(), signal.%s)" % sys.argv[3]
demo.train([sys.executable, "-c", kill], Path(sys.argv[2]) / "train.log", 10, "retina_lm")
"""
    for name in ("SIGKILL", "SIGTERM"):
        done = run_cli("python", "-c", program, DEMO, tmp_path, name, check=False)
        assert done.returncode == 1
        said = done.stderr.strip().splitlines()[-1]
        assert said.endswith(
            f"demo: training retina_lm was killed by {name}; the same command goes on with it (its output is in "
            f"{tmp_path / 'train.log'})"
        )
        assert "a last line" not in said
        assert "failed" not in said


@pytest.mark.slow
def test_the_demo_prints_its_table_a_text_for_each_prompt_and_what_to_type_next(tmp_path: Path) -> None:
    script = DEMO / "run.py"
    done = run_cli("python", script, "--updates", "24", "--out", tmp_path, timeout=1200.0)
    number = r" +([\d.,]+)"
    rows = re.findall(r"^(vanilla_lm|retina_lm)" + 3 * number, done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["vanilla_lm", "retina_lm"]
    # So few updates bring a model below a uniform guess over its 3,776 symbols.
    assert all(1.0 < float(row[1]) < 3776.0 for row in rows)
    longer = re.findall(r"^ *([\d,]+)" + 6 * number + "$", done.stdout, re.MULTILINE)
    assert [row[0] for row in longer] == ["256", "1,024", "4,096"]
    dense, constant = ([int(row[column].replace(",", "")) for row in longer] for column in (5, 6))
    assert dense[2] == pytest.approx(16 * dense[0], rel=0.01)
    assert len(set(constant)) == 1
    samples, last = done.stdout.partition("5. Samples")[2].split("What to type next")
    assert re.findall(r"^   (Return True if|Note that the user)", samples, re.MULTILINE) == [
        "Return True if",
        "Note that the user",
    ]
    *_, written = re.findall(r"^  fairseq-ms sample (\S+) ", last, re.MULTILINE)
    assert (ROOT / written).is_file()
    assert (tmp_path / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    assert "warning" not in (done.stdout + done.stderr).lower()
