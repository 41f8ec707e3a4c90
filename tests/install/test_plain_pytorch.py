"""The example's plain PyTorch loop: processes, checkpoints, and what it refuses."""

import contextlib
import errno
import io
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from fairseq_ms import core
from tests.helpers.cli import ROOT, run_cli
from tests.helpers.faults import Damage, cut, flip_weight
from tests.helpers.trained import random_lines, write_corpus
from tests.tools.test_lock import holding

SCRIPT = ROOT / "user_dir_examples" / "plain_pytorch" / "train.py"
SMALL = ["--set", "dim=24", "ffn_dim=40", "heads=3", "layers=1", "dropout=0", "attention_dropout=0", "init_std=0.2"]
SMALL += ["--rows", "4", "--length", "40", "--save-every", "2", "--lr", "0.01"]


STREAMS = ["--model", "TransformerXL", *SMALL[:6], "segment_len=20", "mem_len=20", *SMALL[7:]]


def losses(*arguments: str, processes: int = 1) -> dict[int, float]:
    """Those at checkpoints, by update, of what is validated on where there is any; a single process is this one."""
    if processes > 1:
        launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(processes))
        printed = run_cli("python", *launch, SCRIPT, *arguments).stdout
    else:
        out = io.StringIO()
        with patch.object(sys, "argv", [str(SCRIPT), *arguments]), contextlib.redirect_stdout(out):
            runpy.run_path(str(SCRIPT), run_name="__main__")
        printed = out.getvalue()
    found = re.findall(r"update (\d+): loss ([\d.]+)(?:, validated ([\d.]+))?", printed)
    return {int(update): float(validated or loss) for update, loss, validated in found}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line that is printed, by argparse or by Python where a script exits with a sentence."""
    with pytest.raises(SystemExit) as stop:
        losses(*arguments)
    assert stop.value.code
    return f"{capsys.readouterr().err}\n{stop.value.code}" if stop.value.code != 2 else capsys.readouterr().err


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat, and nobody knew why she did. " * 80)
    return str(path)


def test_without_a_gpu_a_model_is_small_where_nothing_else_is_said(text: str, tmp_path: Path) -> None:
    given = ["--model", "Retina", "--set", "layers=1", "--steps", "1", "--rows", "1", "--out", str(tmp_path / "o")]
    with patch("torch.cuda.is_available", return_value=False):
        losses(text, *given)
    sizes = torch.load(tmp_path / "o" / "checkpoint.pt", weights_only=True)["configuration"]
    assert (sizes["dim"], sizes["layers"]) == (192, 1)


# Sums over four rows in two parts, float32; Muon rounds to eight bits, which another order of sums may tip.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("muon", "off", "given"),
    [("0", 1e-6, SMALL), ("0.02", 1e-3, SMALL), ("0.02", 1e-3, STREAMS)],
    ids=["adamw", "muon", "xl"],
)
def test_two_processes_have_the_losses_of_one_and_go_on_where_the_other_number_stopped(
    muon: str, off: float, given: list[str], text: str, tmp_path: Path
) -> None:
    given = [text, *given, "--muon-lr", muon]
    out = [["--out", str(tmp_path / name)] for name in ("one", "two")]
    one = losses(*given, *out[0], "--steps", "6")
    assert list(one) == [2, 4, 6]
    two = losses(*given, *out[1], "--steps", "6", processes=2)
    assert two == pytest.approx(one, abs=off)
    assert two[6] < two[2]
    more = losses(*given, *out[0], "--steps", "8", processes=2)
    assert more == pytest.approx(losses(*given, *out[1], "--steps", "8"), abs=2 * off)
    assert list(more) == [8]


@pytest.mark.parametrize("given", [SMALL, STREAMS], ids=["vanilla", "xl"])
def test_a_training_that_is_killed_goes_on_bit_for_bit_and_its_file_is_a_model(
    given: list[str], text: str, tmp_path: Path
) -> None:
    """With dropout, Muon and what streams remember."""
    given = [text, *(item.replace("dropout=0", "dropout=0.2") for item in given), "--steps", "6", "--out"]
    synced: set[int] = set()
    with patch("os.fsync", lambda file: synced.add(os.fstat(file).st_ino)):
        whole = losses(*given, str(tmp_path / "whole"))
    assert (tmp_path / "whole" / "checkpoint.pt").stat().st_ino in synced
    clipping = iter([torch.nn.utils.clip_grad_norm_] * 3)
    with patch("torch.nn.utils.clip_grad_norm_", lambda *args: next(clipping)(*args)), pytest.raises(StopIteration):
        losses(*given, str(tmp_path / "cut"))
    assert losses(*given, str(tmp_path / "cut")) == {update: whole[update] for update in (4, 6)}
    one, other = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "cut"))
    torch.testing.assert_close(other["model"], one["model"], rtol=0, atol=0)
    config = getattr(core, f"{one['name']}Config").from_dict(one["configuration"])
    getattr(core, one["name"])(config).load_state_dict(one["model"])
    assert len(one["tokenizer"]["symbols"]) == 260


def test_every_process_has_its_own_device_before_processes_meet(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", torch.device(device))))

    def meet(backend: str) -> None:
        calls.append(("processes", backend))
        raise StopIteration

    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    with pytest.raises(StopIteration):
        losses(text)
    assert calls == [("device", torch.device("cuda:1")), ("processes", "nccl")]


def test_batches_are_copied_from_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, asked, to = runpy.run_path(str(SCRIPT))["placed"], list[object](), torch.Tensor.to

    def pinned(batch: torch.Tensor) -> torch.Tensor:
        asked.append("pinned")
        return batch

    def moved(batch: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        asked.append(how)
        return to(batch, *where, **how)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    batch = torch.zeros(2, 3, dtype=torch.long)
    assert placed(batch, torch.device("cpu")) is batch
    assert not asked
    assert placed(batch, torch.device("meta")).is_meta
    assert asked == ["pinned", {"non_blocking": True}]


@pytest.mark.parametrize("damage", [flip_weight, cut])
def test_a_damaged_checkpoint_is_not_gone_on_with(
    damage: Damage, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text, *SMALL, "--out", str(tmp_path / "out"), "--steps"]
    losses(*given, "2")
    damage(tmp_path / "out" / "checkpoint.pt", Random(1))
    said = refusal(capsys, *given, "4").strip().splitlines()[-1]
    file = tmp_path / "out" / "checkpoint.pt"
    assert said.startswith(f"a checkpoint must be a file that training wrote, unchanged: {file} is damaged (")


def test_a_full_disk_ends_training_with_one_sentence_and_the_checkpoint_of_before(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [text, *SMALL, "--out", str(tmp_path / "out"), "--steps"]
    losses(*given, "2")
    before = (tmp_path / "out" / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    said = refusal(capsys, *given, "4").strip().splitlines()[-1]
    assert said.startswith("--out must take a whole checkpoint: ")
    assert "(No space left on device); the checkpoints before it are untouched" in said
    assert [(file.name, file.read_bytes()) for file in (tmp_path / "out").iterdir()] == [("checkpoint.pt", before)]


@pytest.mark.slow
def test_the_parts_that_several_processes_write_are_not_gone_on_with_where_one_is_damaged(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    # At the end, when the parts are there, its name is taken.
    (out / "checkpoint.pt" / "taken").mkdir(parents=True)
    given = [text, *SMALL, "--out", str(out), "--steps"]
    with pytest.raises(AssertionError, match="--out must take a whole checkpoint: "):
        losses(*given, "3", processes=2)
    shutil.rmtree(out / "checkpoint.pt")
    part = max((out / "checkpoint").glob("*.distcp"), key=lambda file: file.stat().st_size)
    whole = part.read_bytes()
    part.write_bytes(whole[:2000] + bytes([whole[2000] ^ 4]) + whole[2001:])
    said = refusal(capsys, *given, "4").strip().splitlines()[-1]
    assert said == f"a checkpoint must be as training wrote it, unchanged: {part} is damaged (its checksum is wrong)"
    part.write_bytes(whole)
    assert list(losses(*given, "4")) == [4]


@pytest.mark.parametrize(
    ("changed", "said"),
    [('activation="relu"', 'activation was "gelu" and is "relu"'), ("attention_dropout=0.1", None)],
)
def test_a_training_goes_on_with_the_model_that_it_began_or_says_what_has_changed(
    changed: str, said: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = [text, *SMALL, "--out", str(out), "--steps"]
    losses(*given, "2")
    before = sorted(out.iterdir())
    # Of two values of a field, the last one counts.
    more = [*given, "4", "--set", *SMALL[1:7], changed]
    if said is None:
        assert list(losses(*more)) == [4]
    else:
        last = refusal(capsys, *more).strip().splitlines()[-1]
        assert last == f"--out must be a new folder, or of the same model: in {out}, {said}"
        assert sorted(out.iterdir()) == before


def test_one_training_at_a_time_writes_to_a_folder(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = holding(tmp_path / "out")
    given = [text, *SMALL, "--out", str(tmp_path / "out"), "--steps", "2"]
    try:
        said = refusal(capsys, *given).strip().splitlines()[-1]
        assert said.startswith("--out must be a folder that no other training writes to: ")
    finally:
        other.kill()
        other.wait()
    assert list(losses(*given)) == [2]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint.pt"]


def test_binarised_data_are_read(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "data", {"train": random_lines(1, 60), "valid": random_lines(2, 60)})
    assert losses(str(data / "train"), *SMALL, "--out", str(tmp_path / "out"), "--steps", "2")
    saved = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert len(saved["tokenizer"]["symbols"]) == saved["configuration"]["vocab_size"]


FIELD = "--set must be FIELD=JSON of a VanillaConfig: "


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "dim=wide"], f"{FIELD}Expecting value"),
        (["--set", "width=8"], f"{FIELD}VanillaConfig.__init__() got an unexpected"),
        (["--set", "dim=50"], f"{FIELD}heads must divide dim 50"),
        (["--rows", "0"], "--length must be 1 to "),
        (["--model", "Model"], "train.py: error: argument --model: invalid choice: 'Model'"),
    ],
)
def test_wrong_settings_are_one_sentence(
    text: str, tmp_path: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, text, *arguments, "--out", str(tmp_path / "out"))
    assert said.strip().splitlines()[-1].startswith(sentence)


def test_bad_data_and_a_checkpoint_of_other_sizes_are_one_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "data", {split: random_lines(1, 3) for split in ("empty", "cut", "alone", "train")})
    (tmp_path / "data" / "empty.bin").write_bytes(b"")
    (tmp_path / "data" / "cut.idx").write_bytes((tmp_path / "data" / "cut.idx").read_bytes()[:17])
    (tmp_path / "data" / "alone.bin").unlink()
    (tmp_path / "text").write_text("")
    for name in ("none", "text", "data/empty", "data/cut", "data/alone"):
        assert refusal(capsys, str(tmp_path / name)).strip().startswith("DATA must "), name
    arguments = [text, *SMALL, "--length", "5", "--out", str(tmp_path / "out")]
    # A short text is trained on.
    assert list(losses(*arguments, "--steps", "2")) == [2]
    said = refusal(capsys, *arguments, "--set", "dim=36", "heads=3", "ffn_dim=40", "layers=1", "--steps", "4")
    sizes = f"--out must be a new folder, or of the same model: in {tmp_path / 'out'}, dim was 24 and is 36"
    assert said.strip().splitlines()[-1] == sizes
    # Also where nothing is left to train.
    Path(text).write_text(Path(text).read_text().replace("cat", "dog"))
    assert "--out must be a new folder" in refusal(capsys, *arguments, "--steps", "2")
