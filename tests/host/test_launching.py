"""Processes that torchrun starts, on one machine or on several, train together, and end together when one dies."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed import utils as distributed_utils

from fairseq_ms.errors import UsageError
from fairseq_ms.host import launch, rules
from tests.helpers.cli import run_cli
from tests.helpers.forked import curve, run
from tests.helpers.launched import Nodes
from tests.helpers.resumed import TINY, TRANSFORMER_XL, assert_same_weights, tiny_training
from tests.host.test_errors import unfilled

MODELS = {
    "vanilla_lm": ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "1"),
    "transformer_xl": (*TRANSFORMER_XL, "--tokens-per-sample", "3", "--mem-len", "5"),
}
SCHEDULE = ("--max-epoch", "2", "--save-interval-updates", "2", "--keep-interval-updates", "1")
# How long processes may take to end when one of them has died, on a busy machine.
SOON = 60.0
# Struck in its 7th update, the process of rank 1.
KILLED = """
import os, signal
from fairseq_cli.train import cli_main
from tests.helpers.faults import strike

strike("update", 7, signal.SIGKILL, (1,), int(os.environ["RANK"]))
cli_main()
"""


def command(arch: str, folders: list[Path], save_dir: Path, *more: str) -> list[str]:
    return tiny_training(folders, save_dir, *MODELS[arch], *SCHEDULE, "--distributed-backend", "gloo", *more)


def whole(arch: str, folders: list[Path], place: Path) -> dict:
    """What an uninterrupted run of two processes prints."""
    assert run(command(arch, folders, place / "whole"), place / "whole.log", 2) == [0, 0]
    return curve(place / "whole.log")


def test_two_nodes_of_one_process_each_train_together(folders: list[Path], tmp_path: Path) -> None:
    """Without --distributed-world-size, whose default is the number of GPUs of a node."""
    expected = whole("vanilla_lm", folders, tmp_path)
    with Nodes(command("vanilla_lm", folders, tmp_path / "run"), tmp_path / "nodes") as nodes:
        assert nodes.wait(120) == [0, 0], nodes.printed()
    assert curve(nodes.log_of(0)) == expected
    assert curve(nodes.log_of(1)) == {}, "the first process prints for all"
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_when_a_process_is_killed_the_others_end_and_the_same_command_goes_on(
    folders: list[Path], tmp_path: Path
) -> None:
    expected = whole("transformer_xl", folders, tmp_path)
    (tmp_path / "killing.py").write_text(KILLED)
    nodes = command("transformer_xl", folders, tmp_path / "run"), tmp_path / "killed"
    with Nodes(*nodes, program=tmp_path / "killing.py") as killed:
        while not any(process.poll() is not None for process in killed.processes):
            time.sleep(0.1)
        assert 0 not in killed.wait(SOON)
    before = curve(killed.log_of(0))
    assert before
    assert all(expected[place] == record for place, record in before.items())
    with Nodes(command("transformer_xl", folders, tmp_path / "run"), tmp_path / "again") as again:
        assert again.wait(120) == [0, 0], again.printed()
    after = curve(again.log_of(0))
    assert 0 < len(after) < len(expected), "it goes on, and does not begin anew"
    assert before | after == expected
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_one_process_of_a_group_trains_and_resumes_as_one_alone(folders: list[Path], tmp_path: Path) -> None:
    """Over NCCL on a GPU, so that its code has run where there is one GPU only; over gloo on a CPU."""
    on_gpu = torch.get_default_device().type == "cuda"
    curves: dict[str, dict] = {"alone": {}, "group": {}}
    for place, end in (("alone", "9"), ("group", "4"), ("group", "9")):
        meeting = ("--distributed-no-spawn", "--distributed-init-method", f"{tmp_path.as_uri()}/met{end}")
        group = ("--distributed-world-size", "1", "--distributed-backend", "nccl" if on_gpu else "gloo", *meeting)
        more = (*MODELS["vanilla_lm"], *SCHEDULE, "--max-update", end, *(group if place == "group" else ()))
        arguments = tiny_training(folders, tmp_path / place, *more)
        printed = run_cli(*[word for word in arguments if not (on_gpu and word == "--cpu")])
        log = tmp_path / f"{place}{end}.log"
        log.write_text(printed.stdout + printed.stderr)
        assert ("initialized host" in log.read_text()) == (place == "group")
        curves[place] |= curve(log)
    norms = [[float(record["gnorm"]) for record in found.values() if "gnorm" in record] for found in curves.values()]
    assert len(norms[0]) >= 9
    # Printed with three decimals; a GPU may add up in another order.
    assert norms[1] == pytest.approx(norms[0], abs=2e-3 if on_gpu else 0.0)
    if not on_gpu:
        assert_same_weights(tmp_path / "alone", tmp_path / "group")


# The second process of the second of two nodes with two GPUs, as torchrun starts it.
LAUNCHED = {"MASTER_ADDR": "first", "MASTER_PORT": "1", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
KEPT = {"distributed_init_method": "tcp://other:2", "distributed_world_size": 2, "distributed_rank": 1}


@pytest.mark.parametrize(
    ("launched", "gpus", "given", "expected"),
    [
        *((LAUNCHED, 2, {"distributed_world_size": size}, ("env://", 4, 3, 1, True)) for size in (1, 2, 4)),
        # A process with a GPU of its own takes that.
        (LAUNCHED, 1, {"distributed_world_size": 1}, ("env://", 4, 3, 0, True)),
        # What the user says of how processes meet is kept.
        (LAUNCHED, 2, {**KEPT, "distributed_no_spawn": True}, ("tcp://other:2", 2, 1, 0, True)),
        ({**LAUNCHED, "WORLD_SIZE": "1"}, 2, {"distributed_world_size": 1}, (None, 1, 0, 0, False)),
        ({}, 2, {"distributed_world_size": 1}, (None, 1, 0, 0, False)),
    ],
)
def test_a_launcher_is_believed_unless_the_user_says_otherwise(
    launched: dict, gpus: int, given: dict, expected: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not {"RANK", "WORLD_SIZE"} & set(os.environ)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    cfg = unfilled()
    cfg.distributed_training = DistributedTrainingConfig(tpu=False, **given)
    # ``main`` starts no processes by itself.
    launch.run_together(lambda cfg, main: None, cfg, lambda cfg: None)
    found = cfg.distributed_training
    assert (found.distributed_init_method, found.distributed_world_size) == expected[:2]
    assert (found.distributed_rank, found.device_id, found.distributed_no_spawn) == expected[2:]


@pytest.mark.parametrize(
    ("given", "gpus", "environment", "expected"),
    [
        ({"distributed_world_size": 2}, 0, {}, "--distributed-world-size must be at most the 0 GPUs here .*: got 2"),
        ({"distributed_world_size": 2, "distributed_port": 1234}, 1, {}, "--distributed-world-size must .*: got 2"),
        ({"distributed_world_size": 2}, 0, {**LAUNCHED, "WORLD_SIZE": "1"}, "--distributed-world-size must .*: got 2"),
        ({"distributed_world_size": 2, "distributed_init_method": "file:///x"}, 0, {}, "--distributed-no-spawn must"),
        ({"distributed_world_size": 2, "distributed_port": 1234}, 2, {}, "tcp://localhost:1234"),
        ({"distributed_world_size": 2}, 2, {}, r"tcp://localhost:\d+"),
    ],
)
def test_processes_that_nobody_starts_are_one_sentence_and_those_of_gpus_are_started(
    given: dict, gpus: int, environment: dict, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    cfg, started = unfilled(), []
    cfg.distributed_training = DistributedTrainingConfig(tpu=False, **given)
    monkeypatch.setattr(launch, "_start", lambda *args: started.append(args)) if gpus == 2 else None
    if gpus < 2:
        with pytest.raises(UsageError, match=f"^{expected}"):
            distributed_utils.call_main(cfg, lambda cfg: None)
    else:
        distributed_utils.call_main(cfg, lambda cfg: None)
        assert re.fullmatch(expected, cfg.distributed_training.distributed_init_method)
        assert len(started) == 1


def test_hydra_under_a_launcher_is_told_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides before it imports the package, and would train alone in each."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UsageError, match=r"^distributed_training.distributed_world_size=4 must be given to fairseq-hyd"
    ):
        rules.refuse_to_train(unfilled())
