"""The short form of the campaign, some of its trials, and that what is not survived is noticed and counted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.faults import campaign, trials
from tests.faults.trials import Bench, Failed

# Trials of the kinds that tests/host has not, with all architectures among them; it has damaged checkpoints.
ROWS = {
    "kill -9, one process": "retina_lm",
    "kill -9, one of two": "transformer_xl",
    "SIGTERM, one of two": "transformer_xl",
    "full disk in write": "",
    "train.idx: garbled": "",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("row", ROWS)
def test_a_fault_of_the_campaign_is_survived(row: str, bench: Bench, tmp_path: Path) -> None:
    trial = next(
        trial
        for trial in campaign.all_trials(seed=3, share=0.01, strikes=2)
        if trial.row == row and ROWS[row] in trial.name
    )
    faults, problem = campaign.attempt(trial, bench, tmp_path / "trial")
    assert problem is None, f"{trial.name}: {problem}"
    assert faults >= 1, f"{trial.name} has met no fault"


def test_other_weights_other_losses_and_lost_lines_are_not_survived(bench: Bench, tmp_path: Path) -> None:
    whole = bench.whole("retina_lm", 1)
    log, last = tmp_path / "log", tmp_path / "run" / "checkpoint_last.pt"
    shutil.copytree(whole / "run", tmp_path / "run")
    printed = (whole / "log").read_text()

    def check(text: str, lost: int = 0) -> None:
        log.write_text(text)
        trials.require_same(bench, "retina_lm", 1, tmp_path, [log], lost)

    def without(kind: str) -> str:
        return "".join(line for line in printed.splitlines(keepends=True) if f'"{kind}_loss"' not in line)

    check(printed)
    check(without("train"), lost=3)
    others = re.sub(r'("train_loss": "\d\.\d*)(\d)"', lambda found: f'{found[1]}{9 - int(found[2])}"', printed)
    for text, lost, sentence in (
        (others, 3, "others than in the uninterrupted run"),
        (without("train"), 0, "never printed"),
        (without("valid"), 3, "never printed"),
    ):
        with pytest.raises(Failed, match=sentence):
            check(text, lost)
    (tmp_path / "run" / "checkpoint1.pt.tmp").touch()
    with pytest.raises(Failed, match="half a checkpoint"):
        check(printed)
    (tmp_path / "run" / "checkpoint1.pt.tmp").unlink()
    state = torch.load(last, weights_only=True)
    next(iter(state["model"].values())).view(-1)[0] += 1e-6
    torch.save(state, last)
    with pytest.raises(AssertionError):
        check(printed)
