"""The demo, shortened: every step of it runs and prints what it promises."""

import re
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT, run_cli


@pytest.mark.slow
def test_the_demo_prints_its_table_and_three_samples(tmp_path: Path) -> None:
    script = ROOT / "user_dir_examples" / "demo" / "run.py"
    done = run_cli("python", script, "--updates", "6", "--out", tmp_path, timeout=1200.0)
    rows = re.findall(r"^(vanilla_lm|retina_lm) +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["vanilla_lm", "retina_lm"] * 2
    assert len({row[1] for row in rows}) == 1, "the two models are of one size"
    # Six updates bring a model below a uniform guess over its 4,080 symbols.
    assert all(1.0 < float(row[2]) < 4080.0 for row in rows)
    assert len(re.findall(r"^   \[", done.stdout, re.MULTILINE)) == 3
    assert (tmp_path / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    assert "warning" not in (done.stdout + done.stderr).lower()
