"""The short form of the campaign: some of its trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import campaign
from tests.faults.trials import Bench

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
