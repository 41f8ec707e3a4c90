"""Where a run ends, what it then has saved, and what another command may change when it goes on."""

from __future__ import annotations

import logging
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_ms.host.trainer import Trainer
from fairseq_ms.optim import of_torch
from tests.helpers.forked import curve, run, train
from tests.helpers.resumed import TINY, equal, tiny_training

FLAGS = ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "1", "--log-interval", "1")


def last(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(place / "checkpoint_last.pt", weights_only=True)
    return found


def updates(place: Path) -> int:
    return int(last(place)["optimizer_history"][-1]["num_updates"])


def test_a_cosine_that_is_all_warm_up_trains_to_its_end(folders: list[Path], tmp_path: Path) -> None:
    schedule = ("--lr-scheduler", "cosine", "--warmup-updates", "3", "--max-update", "3")
    train(tiny_training(folders, tmp_path / "run", *FLAGS, *schedule), tmp_path / "log")
    assert updates(tmp_path / "run") == 3
    assert [float(record["lr"]) for (kind, _), record in curve(tmp_path / "log").items() if kind == "train_inner"] == [
        pytest.approx(0.002 * step / 3, abs=1e-6) for step in (1, 2, 3)
    ]


def test_the_end_of_the_last_epoch_is_validated_and_saved_whatever_the_intervals(
    folders: list[Path], tmp_path: Path
) -> None:
    never = ("--save-interval", "1000", "--validate-interval", "1000", "--max-epoch", "2")
    command = tiny_training(folders, tmp_path / "run", *FLAGS, *never)
    train(command, tmp_path / "log")
    ends = [kind for kind, _ in curve(tmp_path / "log") if kind == "valid"]
    assert len(ends) == 1
    made = updates(tmp_path / "run")
    assert curve(tmp_path / "log").keys() >= {("valid", str(made))}
    train(command, tmp_path / "again")
    assert "nothing to train" in (tmp_path / "again").read_text()
    assert updates(tmp_path / "run") == made


@pytest.mark.parametrize(
    ("more", "ranks"), [(("--batch-size", "3"), 1), ((), 2)], ids=["other batches", "other processes"]
)
def test_an_epoch_does_not_go_on_with_other_batches(
    more: tuple[str, ...], ranks: int, folders: list[Path], tmp_path: Path
) -> None:
    save = tmp_path / "run"
    train(tiny_training(folders, save, *FLAGS, "--max-update", "3"), tmp_path / "log")
    before = last(save)
    command = tiny_training(folders, save, *FLAGS, *more, "--max-update", "6")
    assert run(command, tmp_path / "other", ranks) == [1] * ranks
    printed = (tmp_path / "other").read_text()
    assert "Traceback" not in printed
    assert re.search(r"error: --batch-size and the like must stay .*: it has \d+ batches in 1 process", printed)
    assert equal(last(save)["model"], before["model"])
    train([*command, "--reset-dataloader"], tmp_path / "reset", ranks)
    assert updates(save) == 6


@pytest.mark.parametrize("precise", [(), ("--ema-fp32",)])
def test_an_average_of_weights_begins_at_those_of_a_checkpoint_without_one(
    precise: tuple[str, ...], folders: list[Path], tmp_path: Path
) -> None:
    train(tiny_training(folders, tmp_path / "base", *FLAGS, "--max-update", "3"), tmp_path / "log")
    averaged = ("--store-ema", "--ema-decay", "0.999", *precise)
    more = (*FLAGS, *averaged, "--restore-file", str(tmp_path / "base" / "checkpoint_last.pt"))
    train(tiny_training(folders, tmp_path / "run", *more, "--max-update", "4"), tmp_path / "begun")
    base, found = last(tmp_path / "base")["model"], last(tmp_path / "run")["extra_state"]
    name = "ema_fp32_params" if precise else "ema"
    new = last(tmp_path / "run")["model"]
    moved = 0
    for key, weight in found[name].items():
        expected = base[key] + 0.001 * (new[key] - base[key])
        torch.testing.assert_close(weight, expected, rtol=0.0, atol=1e-6)
        moved += int(not new[key].equal(base[key]))
    assert moved
    # And goes on.
    train(tiny_training(folders, tmp_path / "run", *FLAGS, *averaged, "--max-update", "5"), tmp_path / "on")
    assert "EMA not found" not in (tmp_path / "on").read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "saved in runs; the same command goes on"),
        ({"restore_file": "base.pt"}, "saved in runs; without --restore-file the same command goes on"),
        ({"reset_meters": True, "reset_optimizer": True}, "without --reset-optimizer and --reset-meters the same"),
        ({"no_save": True, "reset_meters": True}, "not saved, since --no-save is given"),
    ],
)
def test_what_is_said_of_a_stop_is_so(changed: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"save_dir": "runs", "restore_file": "checkpoint_last.pt"}
    resets = ("reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader")
    settings |= dict.fromkeys((*resets, "no_save", "no_last_checkpoints"), False) | changed
    cfg = SimpleNamespace(checkpoint=SimpleNamespace(**settings))
    caplog.set_level(logging.INFO)
    with pytest.raises(SystemExit):
        Trainer.leave(SimpleNamespace(cfg=cfg, get_num_updates=lambda: 3), signal.SIGTERM)  # type: ignore[arg-type]
    assert said in caplog.text


def test_settings_of_adam_that_a_checkpoint_has_in_their_place_are_named(folders: list[Path], tmp_path: Path) -> None:
    train(tiny_training(folders, tmp_path / "run", *FLAGS, "--max-update", "2"), tmp_path / "log")
    assert " stays " not in (tmp_path / "log").read_text()
    more = ("--weight-decay", "0.5", "--adam-betas", "(0.5, 0.9)", "--max-update", "3")
    train(tiny_training(folders, tmp_path / "run", *FLAGS, *more), tmp_path / "on")
    printed = (tmp_path / "on").read_text()
    assert "--weight-decay stays 0.0, which the checkpoint has, for all that 0.5 is given" in printed
    assert "--adam-betas stays (0.9, 0.999)" in printed
    assert "--adam-eps" not in printed.partition("Namespace")[0].partition("'_name'")[0]
    followed = ("--optimizer-overrides", "{'weight_decay': 0.5, 'betas': (0.5, 0.9)}", "--max-update", "4")
    train(tiny_training(folders, tmp_path / "run", *FLAGS, *more, *followed), tmp_path / "followed")
    assert " stays " not in (tmp_path / "followed").read_text()
    assert last(tmp_path / "run")["last_optimizer_state"]["param_groups"][0]["weight_decay"] == 0.5


def test_groups_without_decay_are_no_other_setting() -> None:
    cfg = SimpleNamespace(weight_decay=0.1, adam_eps=1e-8, adam_betas="(0.9, 0.99)")
    groups = [{"weight_decay": 0.1, "eps": 1e-8, "betas": [0.9, 0.99]}, {"weight_decay": 0.0}]
    assert of_torch.not_followed(cfg, SimpleNamespace(param_groups=groups)) == []
    # Of one that is made of several, there is nothing to compare.
    assert of_torch.not_followed(SimpleNamespace(groups={}), object()) == []
