"""``fairseq-ms train``: what ``fairseq-hydra-train`` trains, from any folder, with little on the screen."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fairseq.dataclass.initialize import hydra_init
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from fairseq_ms import cli
from fairseq_ms.commands import config, train
from fairseq_ms.errors import UsageError
from fairseq_ms.papers.plot import curves
from fairseq_ms.presets.registry import CONFIGS
from tests.helpers.cli import environment, run_cli
from tests.helpers.trained import random_lines, write_corpus

TINY = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 1, "decoder_attention_heads": 4}


@pytest.fixture
def written() -> dict[str, Any]:
    """A small configuration, without data."""
    sections: dict[str, Any] = config.settings(CONFIGS["retina_lm_tiny"], None, 4, "mine")
    sections["model"] |= TINY
    sections["task"]["tokens_per_sample"] = 16
    return sections


@pytest.fixture
def place(written: dict[str, Any], tmp_path: Path) -> Path:
    """A folder with data and a configuration."""
    write_corpus(tmp_path / "data", {"train": random_lines(1, 40), "valid": random_lines(2, 4)})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(written))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "train.idx").write_bytes(b"MMIDIDX")
    return tmp_path


OVERRIDES = ("optimization.lr=[0.5]", "model.dropout=0.2", "+model.init_std=0.3")


@pytest.mark.parametrize("name", ["retina_lm_tiny", "transformer_ql_wt103", "characters_haed"])
def test_it_trains_what_fairseq_hydra_train_would(name: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = config.settings(CONFIGS[name], None, 7)
    sections["task"]["data"] = "somewhere"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(sections))
    overrides = [text for text in OVERRIDES if name == "retina_lm_tiny" or text.startswith("optim")]
    found = train.composed(sections, overrides)
    hydra_init("mine")
    try:
        with initialize_config_dir(str(tmp_path), version_base="1.1"):
            expected = compose("mine", overrides)
    finally:
        GlobalHydra.instance().clear()
    for key in ("user_dir", "log_format", "log_interval"):
        found.common[key] = expected.common[key]
    assert found == expected


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.dropot=0.3", "model.dropout"),
        ("optimization.lr=0.1", "optimization.lr=["),
        ("model.dropout=much", "much"),
        ("nope.lr=1", "section"),
        ("model._name=retina", "retina_lm"),
        ("criterion._name=cross", "cross"),
        ("lr=0.1", "SECTION.NAME"),
        ("~model.dropout", "SECTION.NAME"),
        ("optimization.lr=[0.01", "optimization.lr=[0.01"),
        ("model.dropout=a: b: c", "model.dropout"),
        ("bmuf._name=x", "bmuf._name"),
        ("optimizer._name=adam", ""),
        ("model.scale_windows=1x=0:8,4x=8:64", ""),
    ],
)
def test_a_setting_that_does_not_exist_or_fit_is_named(override: str, named: str, written: dict[str, Any]) -> None:
    written["task"]["data"] = "somewhere"
    if not named:
        train.composed(written, [override])
        return
    with pytest.raises(UsageError) as refused:
        train.composed(written, [override])
    assert override in str(refused.value)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("retina_lm_tiny", "--data"),
        ("retina_lm_tini --data data", "retina_lm_tiny"),
        ("retina_lm_tiny --data nowhere", "--data"),
        ("mine.yaml", "--data"),
        ("mine", "mine.yaml"),
        ("retina_lm_long_2048 --data cut --max-update 1", "--data must be as fairseq-ms prepare writes it"),
        ("data/dict.txt --data data", "CONFIG"),
        ("mine.yaml --data data --arch retina_lm", "--arch"),
        ("mine.yaml --data data --reset-dataloader", "did you mean checkpoint.reset_dataloader=VALUE?"),
        ("mine.yaml --data data --max-updates 9", "did you mean --max-update?"),
        ("mine.yaml --data data common.fp16=true", "--fp16"),
        ("mine.yaml --data data optimizer._name=adam optimizer.adam_betas=3", "--adam-betas"),
        ("mine.yaml --data data model.scale_windows=1x", "--scale-windows"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence_and_leaves_nothing_behind(
    arguments: str, named: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(logging.root, "handlers", [])
    before = sorted(place.rglob("*"))
    assert cli.main(["train", *arguments.split()]) == 2
    out, said = capfd.readouterr()
    assert (said.count("\n"), said[:12], out) == (1, "fairseq-ms: ", "")
    assert named in said
    assert sorted(place.rglob("*")) == before


def test_other_data_of_a_file_of_a_half_are_its_half(written: dict[str, Any], tmp_path: Path) -> None:
    for folder in ("bin", "halves/second"):
        write_corpus(tmp_path / "new" / folder, {"train": random_lines(1, 4)})
    found = {}
    for before in ("old/bin", "old/halves/second"):
        written["task"]["data"] = before
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(written))
        args = argparse.Namespace(config=str(tmp_path / "mine.yaml"), data=tmp_path / "new" / "bin", max_update=None)
        found[before] = train._written(args)["task"]["data"]
    assert found == {before: str(tmp_path / "new" / before[4:]) for before in found}


@pytest.mark.parametrize(
    ("name", "level", "writes"),
    [
        ("retina_lm_tiny", "char", True),
        ("retina_lm_tiny", None, False),
        ("pixels_haed", "image", False),
        ("characters_iem", "char", False),
        ("coarse_lm_wt103_2x", "char", False),
    ],
)
def test_it_is_said_of_a_model_that_sample_writes_with_it_where_that_is_so(
    name: str, level: str | None, writes: bool, tmp_path: Path
) -> None:
    sections: dict[str, Any] = config.settings(CONFIGS[name], None, 7)
    sections["task"]["data"] = str(tmp_path / "bin")
    if level is not None:
        (tmp_path / "manifest.json").write_text(f'{{"settings": {{"level": "{level}"}}}}')
    said = train.said_of(Path("a b/last.pt"), train.composed(sections, []))
    assert ("fairseq-ms sample 'a b/last.pt'" in said) == writes
    assert said.startswith("the model is 'a b/last.pt'\nnext: fairseq-ms ")


@pytest.mark.slow
def test_a_run_shows_its_losses_logs_everything_and_is_repeated_without_a_change(place: Path) -> None:
    command = ("fairseq-ms", "train", "mine.yaml", "--data", "data", "common.log_interval=1")
    first = run_cli(*command, cwd=place)
    assert "update 4 of 4, loss " in first.stdout
    assert "retina_lm: " in first.stdout
    assert len(first.stdout) < 1500
    folder = place / "checkpoints" / "mine"
    assert "'scale_windows'" in (folder / "train.log").read_text(), "the whole configuration"
    assert curves.load(str(folder / "train.log"), "valid", "loss").updates == [4]
    before = {file: file.read_bytes() for file in folder.glob("*.pt")}
    assert {file.name for file in before} == {"checkpoint_best.pt", "checkpoint_last.pt"}
    assert "nothing to train" in run_cli(*command, cwd=place).stdout
    assert {file: file.read_bytes() for file in folder.glob("*.pt")} == before
    assert "update 6 of 6, loss " in run_cli(*command, "--max-update", "6", cwd=place).stdout
    assert "'scale_windows'" in run_cli(*command, "--verbose", "--max-update", "7", cwd=place).stdout


def test_ctrl_c_at_a_terminal_without_a_size_ends_the_bar_and_saves(place: Path) -> None:
    command = [sys.executable, "-m", "fairseq_ms", "train", "mine.yaml", "--data", "data", "--max-update", "100000"]
    given = {name: value for name, value in environment().items() if not name.startswith("TQDM_")}
    terminal, its = pty.openpty()
    process = subprocess.Popen([*command, "optimizer._name=adam"], cwd=place, env=given, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    try:
        while shown.count(b"update ") < 3:
            assert select.select([terminal], [], [], 120)[0], shown
            shown += os.read(terminal, 4096)
        os.kill(process.pid, signal.SIGINT)
        with contextlib.suppress(OSError):
            while True:
                shown += os.read(terminal, 4096)
        assert process.wait(60) == 130
    finally:
        process.kill()
        os.close(terminal)
    assert re.search(rb"(\n| \r)stopped by SIGINT", shown), f"not on a line of its own: {shown!r}"
    assert b"the same command goes on" in shown
    assert b"Traceback" not in shown
    assert (place / "checkpoints" / "mine" / "checkpoint_last.pt").is_file()


def test_threads_wait_passively_before_torch_is_loaded() -> None:
    program = (
        "import os, sys; from fairseq_ms.cli import main; main(['user-dir'])\n"
        "assert os.environ['OMP_WAIT_POLICY'] == sys.argv[1] and 'torch' not in sys.modules"
    )
    without = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"}
    for given in ("passive", "active"):
        own = {} if given == "passive" else {"OMP_WAIT_POLICY": given}
        subprocess.run([sys.executable, "-c", program, given], env={**without, **own}, check=True)
