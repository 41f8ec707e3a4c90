"""What a training shows, and the part of the validation set that it reads on the way."""

from __future__ import annotations

import argparse
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from fairseq_ms import cli
from fairseq_ms.commands import config, train
from fairseq_ms.host import data, launch, screen
from fairseq_ms.presets.registry import CONFIGS
from tests.helpers.cli import run_cli
from tests.helpers.trained import random_lines, write_corpus

TINY = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 1, "decoder_attention_heads": 4}


def test_a_part_is_evenly_spread_and_has_about_so_many_tokens() -> None:
    batches = [[2 * number, 2 * number + 1] for number in range(50)]
    part = data.spread(batches, lambda row: 10, 200)
    assert part == tuple(batches[place] for place in range(0, 50, 5))
    assert data.spread(batches, lambda row: 10, None) == data.spread(batches, lambda row: 10, 2000) == tuple(batches)
    assert data.spread(batches, lambda row: 10, 1) == (batches[0],)


def test_it_says_once_that_validation_has_not_improved_for_a_quarter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=screen.__name__)
    shown = screen.Screen()
    shown.begin(100, 0, math.inf, [])
    for at, loss in ((10, 5.0), (30, 5.5), (34, 5.4), (35, 5.3), (50, 6.0), (55, 4.0), (79, 4.5), (80, 4.5)):
        shown.at = at
        shown.validated(loss)
        said = {35: 1, 50: 1, 55: 1, 79: 1, 80: 2}.get(at, 0)
        assert caplog.text.count("has not improved") == said, at
    assert "since update 10, " in caplog.text
    assert "since update 55, " in caplog.text


def test_what_is_largest_is_best_where_the_metric_is_to_be_maximized(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=screen.__name__)
    shown = screen.Screen()
    shown.begin(100, 0, -math.inf, [])
    for at, accuracy in ((10, 1.0), (30, 2.0), (60, 1.5)):
        shown.at = at
        shown.validated(accuracy, maximize=True)
    assert "since update 30, " in caplog.text


@pytest.mark.parametrize(
    ("metric", "smoothing", "found", "expected"),
    [
        ("loss", 0.0, 3.0, "3.000 bits a token, 8.00 perplexity"),
        ("loss", 0.3, 3.0, "3.000 bits a token, smoothed"),
        ("nll_loss", 0.3, 3.0, "3.000 bits a token, 8.00 perplexity"),
        ("ppl", 0.0, 4096.0, "ppl 4096.000"),
        ("loss", 0.0, 4096.0, "4096.000 bits a token"),
    ],
)
def test_a_validation_is_said_in_its_own_metric(metric: str, smoothing: float, found: float, expected: str) -> None:
    cfg = {"checkpoint": {"best_checkpoint_metric": metric}, "criterion": {"label_smoothing": smoothing}}
    assert screen.said(OmegaConf.create(cfg), found, "token") == expected


def test_a_model_with_a_memory_is_trained_as_any(tmp_path: Path) -> None:
    sections: dict[str, Any] = config.settings(CONFIGS["transformer_ql_small"], None, 2, "mine")
    sizes = {name: size for name, size in TINY.items() if name != "decoder_layers"}
    sections["model"] |= {**sizes, "scale_layers": "1x=1,2x=1", "output_layers": 1, "mem_len": 8}
    sections["task"]["tokens_per_sample"] = 8
    sections["dataset"]["num_workers"] = 0
    write_corpus(tmp_path / "data", {"train": random_lines(1, 40), "valid": random_lines(2, 9)})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(sections))
    said = run_cli("fairseq-ms", "train", "mine.yaml", "--data", "data", cwd=tmp_path).stdout
    assert re.search(r"transformer_ql: .* tokens an update; 2 updates are [\d.]+ passes over 720 tokens", said)
    assert "update 2 of 2, loss" in said


def test_the_first_of_several_processes_shows_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        monkeypatch.setattr(screen, "get_global_rank", lambda rank=rank: rank)
        shown = screen.Screen()
        shown.begin(2, 0, math.inf, [])
        shown.update(2, 3.0)
        assert ("update 2 of 2, loss 3.00" in capsys.readouterr().out) == (rank == 0)


def test_every_process_that_is_started_has_a_screen_where_it_is_asked_for() -> None:
    """What a process is given is the configuration alone."""
    for asked in (True, False, None):
        cfg = OmegaConf.create({} if asked is None else {"screen": asked})
        assert launch._run(lambda cfg: len(screen.screens), cfg) == int(asked is True)
    assert not screen.screens


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Data with a large validation set, and a configuration that validates every ten updates."""
    sections: dict[str, Any] = config.settings(CONFIGS["retina_lm_tiny"], None, 20, "mine")
    sections["model"] |= TINY
    sections["task"]["tokens_per_sample"] = 16
    sections["dataset"]["num_workers"] = 0
    write_corpus(tmp_path / "data", {"train": random_lines(1, 40), "valid": random_lines(2, 300)})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path


def validations(log: str) -> list[tuple[int, float]]:
    return [(int(at), float(loss)) for loss, at in re.findall(r"\| valid \|.* loss ([\d.]+) .*num_updates (\d+)", log)]


@pytest.mark.slow
def test_a_run_shows_what_it_is_and_validates_on_a_part_that_a_resumed_run_keeps(place: Path) -> None:
    command = ("fairseq-ms", "train", "mine.yaml", "--data", "data")
    log, last = place / "checkpoints/mine/train.log", place / "checkpoints/mine/checkpoint_last.pt"
    first = run_cli(*command, cwd=place).stdout
    assert re.search(r"retina_lm: [\d,]+ parameters, on .*; \d+ tokens an update; 20 updates are 1\.\d passes", first)
    assert "update 20 of 20, loss" in first
    assert re.search(r"validated on all of valid: [\d.]+ bits a token", first)
    assert first.splitlines()[-1].startswith("next: ") or "next: " in first.splitlines()[-2]
    assert "gnorm" not in first
    part = 0.3 * 10 * 4 * 16
    assert torch.load(last, weights_only=True)["extra_state"]["valid_tokens"] == int(part)
    found = validations(log.read_text())
    assert [at for at, _ in found] == [10, 20], "the whole is no point of the curve"
    whole = float(re.search(r"validated on all of valid: ([\d.]+)", first)[1])  # type: ignore[index]
    assert abs(whole - found[-1][1]) > 0.01, "a part has another loss"
    # With other intervals, the part would be another.
    more = run_cli(*command, "--max-update", "30", "checkpoint.save_interval_updates=5", cwd=place).stdout
    assert "Loaded checkpoint" in more
    assert torch.load(last, weights_only=True)["extra_state"]["valid_tokens"] == int(part)
    assert [at for at, _ in validations(log.read_text())] == [10, 20, 25, 30]


@pytest.mark.slow
def test_two_processes_have_one_bar(place: Path) -> None:
    several = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "fairseq_ms"]
    settings = ["distributed_training.distributed_backend=gloo", "common.cpu=true"]
    done = run_cli(*several, "train", "mine.yaml", "--data", "data", *settings, cwd=place)
    assert done.stdout.count("update 20 of 20, loss") == 1
    found = re.findall(r"retina_lm: .* parameters, on 2 processes, each with the CPU .*", done.stdout)
    assert [line[line.index(";") :] for line in found] == [
        "; 120 tokens an update; 20 updates are 3.3 passes over 720 tokens"
    ]


@pytest.mark.slow
def test_a_run_of_before_is_validated_on_all_of_its_data(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a run keeps today."""
    command = ("fairseq-ms", "train", "mine.yaml", "--data", "data")
    run_cli(*command, "--max-update", "10", cwd=place)
    for name in ("last", "best"):
        file = place / f"checkpoints/mine/checkpoint_{name}.pt"
        state = torch.load(file, weights_only=True)
        del state["extra_state"]["valid_tokens"]
        torch.save(state, file)
    more = run_cli(*command, cwd=place).stdout
    assert "validated on all of" not in more
    state = torch.load(place / "checkpoints/mine/checkpoint_last.pt", weights_only=True)
    assert state["extra_state"]["valid_tokens"] is None


@pytest.mark.parametrize(("updates", "dropout"), [(20, 0.0), (60, 0.1)])
def test_a_preset_for_ones_own_text_has_dropout_where_it_sees_it_often(
    updates: int, dropout: float, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "data", {"train": random_lines(1, 1500), "valid": random_lines(2, 4)})
    preset = CONFIGS["retina_lm_long_2048"]
    passes = updates / config.updates_of_an_epoch(tmp_path / "data" / "train", 2048, "none", 2)
    assert (passes > 4) == (dropout > 0), passes
    assert config.settings(preset, tmp_path / "data", updates)["model"]["dropout"] == dropout


def test_an_epoch_of_a_preset_is_that_of_the_settings_that_are_given(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data", {"train": random_lines(1, 1500), "valid": random_lines(2, 4)})
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)

    def written(*settings: str, updates: str = "20") -> dict[str, Any]:
        given = ["retina_lm_long_2048", "--data", str(tmp_path / "data"), "--max-update", updates]
        args = parser.parse_args(given)
        args.fairseq_flags = list(settings)
        return train._written(args)

    assert written()["model"]["dropout"] == 0.0
    assert written("dataset.batch_size=40")["model"]["dropout"] == 0.1
    assert written("optimization.update_freq=[20]")["model"]["dropout"] == 0.1
    assert written("task.tokens_per_sample=128", updates="60")["model"]["dropout"] == 0.0
    more = written("optimization.max_update=400", "model.dropout=0.3", "dataset.batch_size=none")
    assert more["checkpoint"]["save_interval_updates"] == 20
    # What is no number is refused later, by its name.
    assert more["dataset"]["batch_size"] == 2


@pytest.mark.slow
def test_a_multiple_that_is_given_stays(place: Path) -> None:
    given = ("--max-update", "1", "dataset.required_batch_size_multiple=8", "dataset.batch_size=16")
    run_cli("fairseq-ms", "train", "mine.yaml", "--data", "data", *given, cwd=place)
    assert "'required_batch_size_multiple': 8" in (place / "checkpoints/mine/train.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("checkpoint.patience=1", "optimization.lr=[5.0]", "checkpoint.save_interval_updates=5"), "early stop"),
        (("optimization.max_epoch=1", "checkpoint.save_interval=99", "dataset.validate_interval=99"), "1.0 passes"),
    ],
    ids=["patience", "epochs"],
)
def test_a_run_that_ends_before_its_last_update_says_so_and_scores_all(
    settings: tuple[str, ...], said: str, place: Path
) -> None:
    command = ("fairseq-ms", "train", "mine.yaml", "--data", "data", "--max-update", "60", *settings)
    printed = run_cli(*command, cwd=place).stdout
    assert said in printed
    assert printed.count("validated on all of valid: ") == 1
    state = torch.load(place / "checkpoints/mine/checkpoint_last.pt", weights_only=True)
    made = state["optimizer_history"][-1]["num_updates"]
    assert 0 < made < 60
    if "epoch" in settings[0]:
        assert f"update {made} of {made}, loss" in printed
    assert "nothing to train" in run_cli(*command, cwd=place).stdout


def test_validations_of_a_preset_take_a_tenth_of_the_time_by_its_settings(tmp_path: Path) -> None:
    sections = config.settings(CONFIGS["retina_lm_long_2048"], None, 1200)
    sections["task"]["data"] = str(tmp_path)
    cfg = train.composed(sections, [])
    assert cfg.checkpoint.save_interval_updates == 60
    # A token that is scored costs a third of one that is trained on.
    tokens = train.valid_tokens(cfg)
    assert tokens is not None
    assert tokens / 3 / (60 * 2 * 2048) == pytest.approx(0.1)
    assert cli.main(["config", "retina_lm_long_2048"]) == 0
