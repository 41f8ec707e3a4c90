"""``fairseq-train --criterion linear_cross_entropy`` and what reads its checkpoints, as users run them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.cli import USER_DIR
from tests.helpers.corpus import train_command, write_corpus
from tests.helpers.forked import train

# Several batches an update, a last one that is smaller, dropout, and smoothing of none.
MORE = ("--update-freq", "2", "--dropout", "0.1", "--max-update", "6")


def records(log: str, kind: str) -> list[dict[str, str]]:
    """What fairseq printed of training or validation."""
    return [json.loads(line) for line in re.findall(rf"{kind} \| (\{{.*\}})", log)]


def printed_by(place: Path, *command: object) -> str:
    """What a command prints, which ends well."""
    train([str(part) for part in command], place / "log")
    return (place / "log").read_text()


@pytest.mark.parametrize("arch", ["retina_lm", "compressive_transformer"])
def test_training_validation_and_evaluation_are_those_of_cross_entropy(arch: str, tmp_path: Path) -> None:
    data, printed = write_corpus(tmp_path), []
    for criterion in ("linear_cross_entropy", "cross_entropy"):
        folder = tmp_path / criterion
        trained = printed_by(tmp_path, *train_command(arch, data, folder, *MORE, "--criterion", criterion))
        path = ("--user-dir", USER_DIR, "--path", folder / "checkpoint_last.pt", "--cpu")
        task = "streaming_language_modeling" if arch == "compressive_transformer" else "language_modeling"
        printed_by(
            tmp_path, "fairseq-validate", data, *path, "--task", task, "--valid-subset", "valid", "--batch-size", "3"
        )
        evaluated = printed_by(tmp_path, "fairseq-eval-lm", data, *path, "--tokens-per-sample", "24")
        training, validation = (records(trained, kind) for kind in ("train_inner", "valid"))
        loss = re.search(r"Loss \(base 2\): ([\d.]+)", evaluated)
        assert len(training) == 6
        assert validation
        assert loss
        numbers = [each[name] for each in training for name in ("loss", "gnorm")]
        numbers += [each["valid_loss"] for each in validation] + [loss[1]]
        printed.append([float(number) for number in numbers])
    # Sums of float32 in another order, of which three decimals are printed: the last one may be rounded otherwise.
    assert printed[0] == pytest.approx(printed[1], rel=0.0, abs=1.01e-3)
