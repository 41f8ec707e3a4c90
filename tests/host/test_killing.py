"""A run that is killed anywhere goes on as if nothing had happened: one architecture of each family."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest

from fairseq_ms.tools.whole_files import defect
from tests.helpers.faults import strike
from tests.helpers.forked import curve, run, train
from tests.helpers.resumed import HAED, RETINA, TRANSFORMER_XL, assert_same_weights, tiny_training

ARCHITECTURES = {
    "retina_lm": ("--arch", "retina_lm", *RETINA),
    "transformer_xl": (*TRANSFORMER_XL, "--tokens-per-sample", "3", "--mem-len", "5"),
    "haed": ("--arch", "haed", *HAED, "--max-segment-len", "3"),
}
# Each moment strikes another start of the run; the fifth call of the disk is in the middle of a first checkpoint.
MOMENTS = (("saving", 5), ("forward", 60), ("saving", 40), ("validation", 3), ("between epochs", 1))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_run_that_is_killed_again_and_again_ends_as_the_uninterrupted_one(
    arch: str, folders: list[Path], tmp_path: Path
) -> None:
    schedule = ("--max-epoch", "3", "--save-interval-updates", "2", "--keep-interval-updates", "2")
    command, place = functools.partial(tiny_training, folders), tmp_path / "run"
    train(command(tmp_path / "whole", *ARCHITECTURES[arch], *schedule), tmp_path / "whole.log")
    expected, printed = curve(tmp_path / "whole.log"), dict[tuple[str, str], dict[str, str]]()
    for moment, count in MOMENTS:
        fault = functools.partial(strike, moment, count, signal.SIGKILL, (0,))
        assert run(command(place, *ARCHITECTURES[arch], *schedule), tmp_path / "log", 1, fault) == [-signal.SIGKILL]
        printed |= curve(tmp_path / "log")
        assert not any(defect(str(path)) for path in place.glob("*.pt")), "a checkpoint is whole or has another name"
    train(command(place, *ARCHITECTURES[arch], *schedule), tmp_path / "log")
    printed |= curve(tmp_path / "log")
    # Of an epoch that was killed between its checkpoint and the line it prints, that line is lost.
    assert printed == {at: record for at, record in expected.items() if at in printed}
    assert all(kind == "train" for kind, _ in expected.keys() - printed)
    assert_same_weights(tmp_path / "whole", place)
    assert not list(place.glob("*.tmp"))
