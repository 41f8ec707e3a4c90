"""The demo of haed's two phases, for a few seconds a model."""

import json
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT, run_cli

DEMO = ROOT / "user_dir_examples" / "haed" / "demo.py"


@pytest.mark.slow
def test_the_demo_trains_both_ways_evaluates_and_writes(tmp_path: Path) -> None:
    left = tmp_path / "out" / "haed" / "checkpoint_last.pt"
    left.parent.mkdir(parents=True)
    left.write_text("of an earlier demo, with other settings")
    (left.parent / ".made-by-haed-demo").touch()
    done = run_cli(
        *("python", DEMO, "--seconds", "2", "--decoder-units", "16", "--batch-size", "1", "--tokens", "64"),
        *("--out", tmp_path / "out"),
    )
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert set(runs) == {"haed", "haed_iem"}
    # From about all symbols being as likely to anything that training for seconds reaches.
    assert all(1.0 < found["bits"] < 8.0 and found["updates"] > 0 for found in runs.values())
    assert "bits per token" in done.stdout
    assert done.stdout.split("goes on from 'Return the ':")[1].strip().startswith("Return the ")


def test_the_demo_leaves_folders_of_others_alone(tmp_path: Path) -> None:
    mine = tmp_path / "out" / "haed" / "checkpoint_last.pt"
    mine.parent.mkdir(parents=True)
    mine.write_text("a week of training")
    done = run_cli("python", DEMO, "--out", tmp_path / "out", check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"{mine.parent} is not of its making")
    assert mine.read_text() == "a week of training"


@pytest.mark.parametrize("flags", [("--runs", "haed,lstm"), ("--seconds", "0")])
def test_the_demo_refuses_what_it_does_not_know(flags: tuple[str, ...], tmp_path: Path) -> None:
    done = run_cli("python", DEMO, *flags, "--out", tmp_path / "out", check=False)
    assert done.returncode == 2
    assert "--runs must be some of hred,hred_transformer,haed,haed_iem, and --seconds positive" in done.stderr
    assert not (tmp_path / "out").exists()
