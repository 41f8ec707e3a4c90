"""What is best is counted by run: anew in every run of a process, and on when a run is resumed."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

from fairseq import checkpoint_utils

from tests.helpers.faults import strike
from tests.helpers.forked import curve, run
from tests.helpers.resumed import TINY, tiny_training

FLAGS = ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "1")
# Nothing is learnt, so that the loss of the first epoch stays the best.
STUCK = (*FLAGS, "--lr", "0", "--max-epoch", "9", "--patience", "3", "--dropout", "0")


def test_a_later_run_of_a_process_has_a_best_checkpoint_whatever_its_losses(
    folders: list[Path], tmp_path: Path
) -> None:
    fault = functools.partial(setattr, checkpoint_utils.save_checkpoint, "best")
    command = tiny_training(folders, tmp_path / "run", *FLAGS, "--max-epoch", "1")
    assert run(command, tmp_path / "log", fault=fault) == [0]
    assert (tmp_path / "run" / "checkpoint_best.pt").is_file()


def validations(log: Path) -> list[str]:
    return [update for kind, update in curve(log) if kind == "valid"]


def test_patience_ends_a_run_that_is_interrupted_when_it_ends_the_uninterrupted_one(
    folders: list[Path], tmp_path: Path
) -> None:
    assert run(tiny_training(folders, tmp_path / "whole", *STUCK), tmp_path / "whole.log") == [0]
    expected = validations(tmp_path / "whole.log")
    assert 3 < len(expected) < 9
    per_epoch = int(expected[0])
    found = []
    for epoch in range(2, 9):
        # After the second update of each epoch but the first; every process counts its own.
        count = per_epoch if epoch > 2 else per_epoch + 2
        fault = functools.partial(strike, "update", count, signal.SIGTERM, (0,))
        log = tmp_path / f"{epoch}.log"
        codes = run(tiny_training(folders, tmp_path / "run", *STUCK), log, 1, fault)
        found += validations(log)
        if codes == [0]:
            break
    assert found == expected
