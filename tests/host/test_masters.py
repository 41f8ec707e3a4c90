"""Trainings in half precision resume with their float32 masters and with what the scaler of losses has counted."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.logging import metrics
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq_cli.train import main
from omegaconf import OmegaConf

from fairseq_ms.host import rules
from fairseq_ms.host.trainer import Trainer
from fairseq_ms.presets.haed import composite
from tests.curves.runs import RUNS, corpus, flags_of
from tests.helpers.resumed import assert_same_weights, equal
from tests.helpers.trained import configuration

HALF, WHOLE = 3, 6
BF16 = {"bf16": True}
# The scale is doubled after every fourth update: within the second half.
FLAT = {"fp16": True, "fp16_scale_window": 4, "fp16_init_scale": 4}
FP16 = {**FLAT, "fp16_no_flatten_grads": True}
MUON = ("muon", "--adam-lr", "0.003")
RATES = {"encoder": (0.004, 0.0), "main": (0.002, 0.0), "decoder": (0.004, 0.0)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("masters") / "data")


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as fairseq's fp16 asks for one: parameters on a CPU have no number of a device."""
    monkeypatch.setattr(rules, "refuse_to_train", lambda cfg: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


@functools.cache
def parsed(run: str, data: Path, *optimizer: str) -> Any:
    flags = [part for name, value in flags_of(run).items() for part in (f"--{name}", str(value))]
    arguments = [data, "--arch", RUNS[run][0], *(part for part in flags if part != "True"), "--optimizer", *optimizer]
    more = ("--batch-size", "4", "--lr", "0.003", "--clip-norm", "1.0", "--seed", "3", "--cpu", "--num-workers", "0")
    quiet = ("--log-format", "none", "--disable-validation", "--no-epoch-checkpoints", "--save-dir", "none")
    return configuration(flags_of(run)["task"], [*arguments, *more, *quiet])


def train(cfg: Any, save_dir: Path, updates: int, only_load: bool = False, **changes: Any) -> Trainer:
    """``fairseq-train`` up to so many updates, from the checkpoint of before if there is one."""
    cfg = copy.deepcopy(cfg)
    cfg.optimization.max_update, cfg.checkpoint.save_dir = updates, str(save_dir)
    for name, value in changes.items():
        cfg["common" if name in cfg.common else "checkpoint"][name] = value
    trainers: list[Trainer] = []
    build = Trainer._build_optimizer

    def noted(trainer: Trainer) -> None:
        trainers.append(trainer)
        build(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_build_optimizer", noted)
        if only_load:
            # What comes after it.
            patch.setattr(Trainer, "get_train_iterator", lambda *_, **__: sys.exit())
        metrics.reset()
        with contextlib.suppress(SystemExit):
            main(cfg)
        metrics.reset()
    return trainers[0]


def assert_resumes(cfg: Any, folder: Path, **precision: Any) -> Trainer:
    whole = train(cfg, folder / "whole", WHOLE, **precision)
    train(cfg, folder / "resumed", HALF, **precision)
    resumed = train(cfg, folder / "resumed", WHOLE, **precision)
    assert_same_weights(folder / "whole", folder / "resumed")
    assert equal(masters_of(whole), masters_of(resumed))
    return resumed


def masters_of(trainer: Trainer) -> list[torch.Tensor]:
    """As fairseq keeps them: one for each parameter, or one for all."""
    masters = getattr(trainer.optimizer, "fp32_params", [])
    return [master.data for master in (masters.values() if isinstance(masters, dict) else masters)]


@pytest.mark.parametrize("run", [run for run in RUNS if "vanilla" not in run])
def test_every_architecture_resumes_bit_for_bit(run: str, data: Path, tmp_path: Path) -> None:
    trainer = assert_resumes(parsed(run, data, *MUON), tmp_path, **BF16)
    assert any(not torch.equal(master, master.bfloat16()) for master in masters_of(trainer))


@pytest.mark.parametrize("precision", [BF16, FP16, FLAT], ids=["bf16", "fp16", "flat"])
@pytest.mark.parametrize("optimizer", [("adam",), ("adamw",), MUON], ids=lambda given: given[0])
def test_every_optimizer_resumes_bit_for_bit(
    optimizer: tuple[str, ...], precision: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    trainer = assert_resumes(parsed("vanilla_lm", data, *optimizer), tmp_path, **precision)
    assert isinstance(trainer.optimizer, FP16Optimizer)
    assert trainer.optimizer.has_flat_params == (precision is FLAT and optimizer != MUON)
    assert precision is BF16 or trainer.optimizer.scaler.loss_scale == 8


@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_an_optimizer_of_several_resumes_bit_for_bit(precision: dict[str, Any], data: Path, tmp_path: Path) -> None:
    cfg = copy.deepcopy(parsed("haed", data, "adam"))
    settings: Any = composite(RATES, 2)
    for group in settings["groups"].values():
        group["lr_scheduler"] |= {"max_update": 9, "lr": None}
    cfg.optimizer, cfg.lr_scheduler = OmegaConf.create(settings), OmegaConf.create({"_name": "pass_through"})
    assert_resumes(cfg, tmp_path, **precision)


def test_the_scaler_of_autocast_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", functools.partial(torch.amp.GradScaler, "cpu", growth_interval=4))
    trainer = assert_resumes(parsed("vanilla_lm", data, "adam"), tmp_path, amp=True, fp16_init_scale=4)
    assert trainer.optimizer.scaler.get_scale() == 8


def averaged(state: dict[str, Any]) -> None:
    for weight in state["model"].values():
        weight.mul_(0.75)


def edited(state: dict[str, Any]) -> None:
    state["model"]["decoder.core.project.weight"][0, 0] += 1


def older(state: dict[str, Any]) -> None:
    del state["extra_state"]["masters"]


@pytest.mark.parametrize(
    ("edit", "settings", "kept", "said"),
    [
        (None, {}, "all", ""),
        (edited, {}, "most", "1 of"),
        (averaged, {}, "none", "of"),
        (older, {}, "none", "no float32 masters"),
        (None, {"reset_optimizer": True}, "none", ""),
        (None, {"no_save_optimizer_state": True}, "none", "no float32 masters"),
    ],
)
def test_masters_are_taken_where_they_round_to_the_weights(
    edit: Callable[[dict[str, Any]], None] | None,
    settings: dict[str, bool],
    kept: str,
    said: str,
    data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg, path = parsed("vanilla_lm", data, "adam"), tmp_path / "checkpoint_last.pt"
    before = masters_of(train(cfg, tmp_path, HALF, **BF16, **settings))
    if edit is not None:
        state = torch.load(path, weights_only=True)
        edit(state)
        torch.save(state, path)
    caplog.clear()
    resumed = train(cfg, tmp_path, WHOLE, **BF16, **settings, only_load=True)
    weights = [weight.detach().float() for weight in resumed.get_model().parameters()]
    masters = masters_of(resumed)
    old = [torch.equal(master, one) for master, one in zip(masters, before, strict=True)]
    assert {0: "none", len(old) - 1: "most", len(old): "all"}[sum(old)] == kept
    assert all(was or torch.equal(master, weight) for was, master, weight in zip(old, masters, weights, strict=True))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [said in message for message in warned if "masters" in message] == [True] * bool(said)
