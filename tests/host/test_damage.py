"""Damaged and malicious checkpoints: recognised before they are read, and passed over where there is an intact one."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_ms.errors import UsageError
from fairseq_ms.host import damage
from fairseq_ms.host.damage import defect
from tests.helpers.cli import USER_DIR, run_cli
from tests.helpers.forked import curve, run
from tests.helpers.resumed import assert_same_weights, equal, tiny_training, write_parts

FLAGS = ("--arch", "vanilla_lm", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "8", "--decoder-layers", "1")
TINY = (*FLAGS, "--decoder-attention-heads", "1", "--save-interval-updates", "2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_parts(tmp_path_factory.mktemp("corpus"))[:1]


@pytest.fixture(scope="module")
def trained(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, with a checkpoint after every second update."""
    save_dir = tmp_path_factory.mktemp("run")
    assert run(tiny_training(folders, save_dir, *TINY, "--max-epoch", "1"), save_dir / "log") == [0]
    return save_dir


@pytest.fixture
def begun(trained: Path, tmp_path: Path) -> Path:
    """A copy of ``trained``."""
    for path in trained.glob("*.pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.marker,)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(random.Random(3).randbytes(path.stat().st_size))


def flip(path: Path) -> None:
    """One bit of a weight, which torch would load."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.file_size if "/data/" in entry.filename else 0)
    content[entry.header_offset + 2 * len(entry.filename) + 100] ^= 4
    path.write_bytes(content)


def zero(path: Path) -> None:
    """A block that never reached the disk."""
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)


DAMAGES: dict[Callable[[Path], None], str] = {
    cut: "its end is missing",
    empty: "it is empty",
    garble: "it does not begin like a checkpoint",
    flip: "the checksum of",
    zero: "its archive cannot be read|the checksum of",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_told_in_a_few_words_and_an_intact_checkpoint_has_none(
    damage: Callable[[Path], None], begun: Path
) -> None:
    path = begun / "checkpoint_last.pt"
    assert defect(str(path)) is None
    damage(path)
    with pytest.raises(
        UsageError,
        match=f"a checkpoint must be a file that fairseq-train wrote, unchanged: .* is damaged .({DAMAGES[damage]})",
    ):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_torch_would_have_loaded_a_flipped_bit(begun: Path) -> None:
    """What the checksums are read for."""
    path = begun / "checkpoint_last.pt"
    before = torch.load(path, weights_only=True)
    flip(path)
    assert not equal(torch.load(path, weights_only=True), before)


def test_a_flipped_bit_is_found_or_changes_nothing(begun: Path) -> None:
    path, rng = begun / "checkpoint_last.pt", random.Random(5)
    whole, found = path.read_bytes(), 0
    expected = torch.load(path, weights_only=True)
    for _ in range(200):
        content = bytearray(whole)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        if defect(str(path)) is None:
            assert equal(torch.load(path, weights_only=True), expected)
        else:
            found += 1
    assert found > 100


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_training_goes_on_from_the_newest_intact_checkpoint_and_says_why(
    damage: Callable[[Path], None], begun: Path, folders: list[Path], trained: Path
) -> None:
    """The one before the newest: checkpoint_best.pt is damaged too, and older by its date is newer by its updates."""
    updates = sorted(int(path.stem.split("_")[2]) for path in begun.glob("checkpoint_1_*.pt"))
    newest = begun / f"checkpoint_1_{updates[-1]}.pt"
    os.utime(newest, (1, 1))
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        damage(begun / name)
    log = begun / "log"
    assert run(tiny_training(folders, begun, *TINY, "--max-epoch", "1"), log) == [0], log.read_text()
    said = [line for line in log.read_text().splitlines() if "going on from" in line]
    assert len(said) == 1
    assert f"{begun / 'checkpoint_last.pt'} is damaged" in said[0]
    assert f"going on from {newest}, after update {updates[-1]}" in said[0]
    assert_same_weights(trained, begun)
    whole = curve(trained / "log")
    assert all(whole[place] == record for place, record in curve(log).items())


def test_two_ranks_go_on_from_the_same_checkpoint(begun: Path, folders: list[Path]) -> None:
    cut(begun / "checkpoint_last.pt")
    log = begun / "log"
    flags = (*TINY, "--max-epoch", "2", "--reset-dataloader")
    assert run(tiny_training(folders, begun, *flags), log, ranks=2) == [0, 0], log.read_text()
    assert "going on from" in log.read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_an_intact_checkpoint_all_ranks_end_with_one_sentence(
    ranks: int, begun: Path, folders: list[Path]
) -> None:
    for path in begun.glob("*.pt"):
        cut(path)
    before = {path: path.read_bytes() for path in begun.glob("*.pt")}
    log = begun / "log"
    assert run(tiny_training(folders, begun, *TINY, "--max-epoch", "2"), log, ranks=ranks) == [1] * ranks
    last = begun / "checkpoint_last.pt"
    # torch adds the number of a rank.
    assert log.read_text().splitlines()[-1].removeprefix("[rank0]: ") == (
        f"fairseq-train: error: --save-dir must hold an intact checkpoint to go on from: {last} is damaged "
        "(its end is missing), and there is no other (remove it to begin anew)"
    )
    assert {path: path.read_bytes() for path in begun.glob("*.pt")} == before


def test_a_file_that_the_user_names_is_not_replaced_by_another(begun: Path, folders: list[Path]) -> None:
    cut(begun / "checkpoint_best.pt")
    flags = (*TINY, "--max-epoch", "2", "--restore-file", str(begun / "checkpoint_best.pt"))
    assert run(tiny_training(folders, begun, *flags), begun / "log") == [1]
    assert "checkpoint_best.pt is damaged" in (begun / "log").read_text().splitlines()[-1]


@pytest.mark.parametrize("form", ["archive", "pickle", "old"])
def test_code_in_a_checkpoint_is_never_run(form: str, begun: Path, folders: list[Path]) -> None:
    last, marker = begun / "checkpoint_last.pt", begun / "marker"
    content = {"model": Malicious(marker)}
    if form == "pickle":
        last.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, last, _use_new_zipfile_serialization=form == "archive")
    command = tiny_training(folders, begun, *TINY, "--max-epoch", "1")
    # A pickle by itself is no checkpoint, which is damage: there are others.
    assert run(command, begun / "log") == [0 if form == "pickle" else 1]
    if form != "pickle":
        assert (begun / "log").read_text().splitlines()[-1] == (
            "fairseq-train: error: a checkpoint must hold tensors and plain values alone, since anything else could "
            f"run code: {last} holds posix.mkdir"
        )
        done = run_cli("fairseq-eval-lm", folders[0], "--user-dir", USER_DIR, "--path", last, "--cpu", check=False)
        assert done.stderr.splitlines()[-1].startswith("fairseq-eval-lm: error: a checkpoint must hold tensors")
    assert not marker.exists()


@pytest.mark.parametrize("asked", [{}, {"weights_only": None}, {"weights_only": 0}])
def test_weights_alone_are_read_whatever_fairseq_asks_of_torch(
    asked: dict[str, Any], begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fairseq's main branch asks for all that a file holds; nothing is read here."""
    given: list[object] = []
    monkeypatch.setattr(torch, "load", lambda *args, **settings: given.append(settings.get("weights_only")))
    recorder = torch.load
    damage._checked(lambda path: torch.load(path, **asked), str(begun / "checkpoint_last.pt"))
    assert len(given) > 1
    assert all(value is True for value in given)
    assert torch.load is recorder


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_a_run_whose_optimizer_has_flags_of_the_old_kind_is_resumed(
    optimizer: str, folders: list[Path], tmp_path: Path
) -> None:
    for epochs in ("1", "2"):
        flags = (*TINY, "--optimizer", optimizer, "--max-epoch", epochs)
        assert run(tiny_training(folders, tmp_path / "run", *flags), tmp_path / "log") == [0]
    assert "Loaded checkpoint" in (tmp_path / "log").read_text()
