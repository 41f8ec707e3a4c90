"""Trainings that fail after they have begun: what is said is what has failed, and nothing more is written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from fairseq_ms.host import rules
from tests.helpers.forked import rank_log, run, train
from tests.helpers.resumed import TINY, tiny_training

MODEL = ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "1", "--max-update", "1")
WINDOWS = (*MODEL, "--scale-windows", "1x=0:3")
ENDLESS = ("--clip-norm", "0", "--optimizer", "sgd", "--lr", "1e37", "--max-update", "9")


def on_a_cpu(rank: int) -> None:
    """Let --fp16 train there."""
    rules.refuse_to_train = rules.refuse


@pytest.mark.parametrize(
    ("flags", "ranks", "resumed"),
    [
        ("", 2, False),
        ("--task streaming_language_modeling --arch transformer_xl", 1, True),
        ("--amp", 1, False),
        ("--bf16", 1, True),
        ("--fp16 --fp16-no-flatten-grads --fp16-init-scale 1 --min-loss-scale 0.9", 1, False),
    ],
)
def test_a_diverging_training_is_one_sentence_and_writes_nothing_more(
    flags: str, ranks: int, resumed: bool, data: Path, tmp_path: Path
) -> None:
    """It names the last checkpoint, where there is one."""
    save, log = tmp_path / "save", tmp_path / "log"
    command = tiny_training([data], save, *MODEL, *ENDLESS, *flags.split())
    if resumed:
        assert run([*command, "--max-update", "1"], log) == [0]
    before = sorted(tmp_path.rglob("*.pt"))
    assert run(command, log, ranks, on_a_cpu) == [1] * ranks
    for rank in range(ranks):
        printed = rank_log(log, rank).read_text()
        assert "Traceback" not in printed
        last = printed.splitlines()[-1]
        assert "fairseq-train: error: --lr must be so low, or --clip-norm" in last
        assert (str(save / "checkpoint_last.pt") in last) == resumed
    assert sorted(tmp_path.rglob("*.pt")) == before
    assert save.exists() == resumed


def with_a_bug(rank: int) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise LookupError("a bug")

    CrossEntropyCriterion.forward = fail


def test_what_fails_within_an_update_is_shown_itself(data: Path, tmp_path: Path) -> None:
    """fairseq writes a checkpoint before, for which a new folder is not there yet."""
    assert run(tiny_training([data], tmp_path / "new", *MODEL), tmp_path / "log", 1, with_a_bug) == [1]
    assert (tmp_path / "log").read_text().splitlines()[-1] == "LookupError: a bug"
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("trained")
    train(tiny_training([data], save, *WINDOWS), save / "log")
    return save


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--decoder-layers 2", "--save-dir must .*--arch.*checkpoint.save_dir"),
        ("--decoder-layers 2 --restore-file {last}", "--restore-file must .*--arch"),
        ("--decoder-layers 2 --save-dir {new} --finetune-from-model {last}", "--finetune-from-model must .*--arch"),
        ("--output-dictionary-size 8 --restore-file {last}", "--restore-file must .* --output-dictionary-size is 14"),
        (
            "--scale-windows 1x=0:2",
            "--save-dir must .*--scale-windows was 1x=0:3 and is 1x=0:2; .*--finetune-from-model",
        ),
        ("--activation-fn relu --restore-file {last}", "--restore-file must .* --activation-fn was gelu and is relu"),
        ("--arch retina_lm", "--save-dir must .*--arch was vanilla_lm"),
        ("--restore-file {new}/none.pt", "--restore-file must .*none.pt"),
        ("--criterion linear_cross_entropy", "--save-dir must .* --criterion"),
        ("--criterion linear_cross_entropy --restore-file {last}", "--restore-file must .* --criterion"),
        ("--optimizer adagrad", "--save-dir must hold the state of the same --optimizer"),
        ("--lr-scheduler inverse_sqrt", "--save-dir must .*--lr-scheduler.*checkpoint.reset_lr_scheduler=true"),
        ("--save-dir {new} --finetune-from-model none.pt", "--finetune-from-model must .*exists"),
        ("--finetune-from-model none.pt --restore-file {last}", "--finetune-from-model must .*--restore-file"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_sentence_with_the_flag_that_names_it(
    flags: str, named: str, data: Path, trained: Path, tmp_path: Path
) -> None:
    given = flags.format(last=trained / "checkpoint_last.pt", new=tmp_path / "new").split()
    assert run(tiny_training([data], trained, *WINDOWS, "--max-update", "2", *given), tmp_path / "log") == [1]
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    assert re.match(f"fairseq-train: error: {named}", printed.splitlines()[-1])


def test_what_may_change_goes_on_and_so_does_a_model_that_is_tuned(data: Path, trained: Path, tmp_path: Path) -> None:
    save, last = shutil.copytree(trained, tmp_path / "save"), trained / "checkpoint_last.pt"
    more = ("--dropout", "0.3", "--tokens-per-sample", "4", "--max-target-positions", "5", "--reset-dataloader")
    train(tiny_training([data], save, *WINDOWS, "--max-update", "2", *more), tmp_path / "log")
    assert torch.load(save / "checkpoint_last.pt", weights_only=True)["optimizer_history"][-1]["num_updates"] == 2
    tuned = ("--scale-windows", "1x=0:2", "--finetune-from-model", str(last))
    train(tiny_training([data], tmp_path / "tuned", *WINDOWS, *tuned), tmp_path / "log")
