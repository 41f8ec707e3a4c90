"""Checkpoints that are complete or absent, damage that is recognised before it is read, and code that never runs."""

from __future__ import annotations

import argparse
import errno
import functools
import os
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_ms.errors import UsageError
from fairseq_ms.host.checkpoints import load_checked
from fairseq_ms.tools import whole_files
from fairseq_ms.tools.whole_files import defect, write
from tests.helpers.faults import DISK, Damage, Making, cut, fail, flip, flip_weight, garble, zero
from tests.helpers.forked import curve, run
from tests.helpers.resumed import TINY, assert_same_weights, equal, tiny_training

STATE = {"model": {"weight": torch.arange(5000.0)}, "step": 3}
FLAGS = ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "1", "--save-interval-updates", "2")
EVERY_SECOND = (*FLAGS, "--max-epoch", "1")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """For faults that are injected into this process: what they replace is put back."""
    monkeypatch.setattr(whole_files, "_PAUSES", whole_files._PAUSES)
    monkeypatch.setattr(whole_files, "open", open, raising=False)
    for call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, getattr(os, call))
    return monkeypatch


def save(path: Path, state: Any = STATE) -> None:
    write(str(path), lambda file: torch.save(state, file))


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("copied", [False, True])
def test_a_checkpoint_has_its_name_only_when_it_is_on_the_disk_and_so_has_the_folder(
    copied: bool, tmp_path: Path, disk: pytest.MonkeyPatch
) -> None:
    """What a loss of power leaves is what was synced before it."""
    happened = []
    fsync, replace = os.fsync, os.replace

    def syncing(handle: int) -> None:
        fsync(handle)
        name = Path(os.readlink(f"/proc/self/fd/{handle}"))
        happened.append(("synced", name, name.stat().st_size if name.is_file() else None))

    def replacing(source: str, target: str) -> None:
        happened.append(("renamed", Path(source), Path(source).stat().st_size))
        replace(source, target)

    path = tmp_path / "checkpoint_last.pt"
    save(tmp_path / "checkpoint1.pt")
    disk.setattr(os, "fsync", syncing)
    disk.setattr(os, "replace", replacing)
    if copied:
        assert PathManager.copy(str(tmp_path / "checkpoint1.pt"), str(path), overwrite=True)
    else:
        save(path)
    temporary, size = tmp_path / "checkpoint_last.pt.tmp", path.stat().st_size
    assert happened == [("synced", temporary, size), ("renamed", temporary, size), ("synced", tmp_path, None)]
    assert equal(read(path), STATE)


@pytest.mark.parametrize("call", DISK)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_disk_that_fails_leaves_the_old_checkpoint_and_nothing_else(
    number: int, call: str, tmp_path: Path, disk: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint_last.pt"
    save(path, "the old one")
    fail(call, number, 1, 100, 0)
    with pytest.raises(UsageError, match=f"--save-dir must take a whole checkpoint: {path} .*{os.strerror(number)}"):
        save(path)
    with pytest.raises(UsageError, match=re.escape(os.strerror(number))):
        PathManager.copy(str(path), str(tmp_path / "checkpoint_best.pt"), overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint_last.pt"]
    assert read(path) == "the old one"


@pytest.mark.parametrize("call", DISK)
def test_a_disk_that_fails_twice_is_tried_a_third_time_from_the_beginning(
    call: str, tmp_path: Path, disk: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "expected.pt")
    fail(call, errno.EIO, 1, 2, 0)
    save(tmp_path / "checkpoint_last.pt")
    assert (tmp_path / "checkpoint_last.pt").stat().st_size == (tmp_path / "expected.pt").stat().st_size
    assert equal(read(tmp_path / "checkpoint_last.pt"), STATE)


def test_what_cannot_be_saved_is_a_bug_and_keeps_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"pickle|local object") as caught:
        save(tmp_path / "checkpoint_last.pt", lambda: None)
    assert not isinstance(caught.value, UsageError)
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def trained(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, with a checkpoint after every second update."""
    save_dir = tmp_path_factory.mktemp("run")
    assert run(tiny_training(folders, save_dir, *EVERY_SECOND), save_dir / "log") == [0]
    return save_dir


@pytest.fixture
def begun(trained: Path, tmp_path: Path) -> Path:
    """A copy of ``trained``."""
    for path in trained.glob("*.pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


DAMAGES: dict[Damage, str] = {
    cut: "its end is missing|its archive cannot be read",
    empty: "it is empty",
    garble: "it does not begin like a checkpoint",
    flip_weight: "the checksum of",
    zero: "its archive cannot be read|the checksum of",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_told_in_a_few_words_and_an_intact_checkpoint_has_none(damage: Damage, begun: Path) -> None:
    path = begun / "checkpoint_last.pt"
    assert defect(str(path)) is None
    damage(path, random.Random(1))
    wrong = f"a checkpoint must be a file that training wrote, unchanged: .* is damaged .({DAMAGES[damage]})"
    with pytest.raises(UsageError, match=wrong):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_a_flipped_bit_that_torch_would_have_loaded_is_found_or_changes_nothing(begun: Path) -> None:
    path, rng = begun / "checkpoint_last.pt", random.Random(5)
    whole, found = path.read_bytes(), 0
    expected = read(path)
    flip_weight(path, rng)
    assert not equal(read(path), expected)
    for _ in range(100):
        path.write_bytes(whole)
        flip(path, rng)
        if defect(str(path)) is None:
            assert equal(read(path), expected)
        else:
            found += 1
    assert found > 50


def test_training_goes_on_from_the_newest_intact_checkpoint_and_says_why(
    begun: Path, folders: list[Path], trained: Path
) -> None:
    """The one before the newest: checkpoint_best.pt is damaged too, and older by its date is newer by its updates."""
    updates = sorted(int(path.stem.split("_")[2]) for path in begun.glob("checkpoint_1_*.pt"))
    newest = begun / f"checkpoint_1_{updates[-1]}.pt"
    os.utime(newest, (1, 1))
    flip_weight(begun / "checkpoint_last.pt", random.Random(1))
    cut(begun / "checkpoint_best.pt", random.Random(1))
    log = begun / "log"
    assert run(tiny_training(folders, begun, *EVERY_SECOND), log) == [0], log.read_text()
    (said,) = [line for line in log.read_text().splitlines() if "going on from" in line]
    assert f"{begun / 'checkpoint_last.pt'} is damaged" in said
    assert f"going on from {newest}, after update {updates[-1]}" in said
    assert_same_weights(trained, begun)
    whole = curve(trained / "log")
    assert all(whole[place] == record for place, record in curve(log).items())


def test_without_an_intact_checkpoint_all_ranks_end_with_one_sentence(begun: Path, folders: list[Path]) -> None:
    for path in begun.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    before = {path: path.read_bytes() for path in begun.glob("*.pt")}
    log = begun / "log"
    assert run(tiny_training(folders, begun, *FLAGS, "--max-epoch", "2"), log, ranks=2) == [1, 1]
    last = begun / "checkpoint_last.pt"
    # torch adds the number of a rank.
    said = log.read_text().splitlines()[-1].removeprefix("[rank0]: ")
    assert said.startswith(f"fairseq-train: error: --save-dir must hold an intact checkpoint to go on from: {last} is")
    assert {path: path.read_bytes() for path in begun.glob("*.pt")} == before


@pytest.mark.parametrize("form", ["archive", "pickle", "old"])
def test_code_in_a_checkpoint_is_never_run_whatever_fairseq_asks_of_torch(form: str, tmp_path: Path) -> None:
    """fairseq's main branch asks for all that a file holds."""
    last, marker = tmp_path / "checkpoint_last.pt", tmp_path / "marker"
    content = {"model": Making(str(marker))}
    if form == "pickle":
        last.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, last, _use_new_zipfile_serialization=form == "archive")
    holds = "must be a file that training wrote" if form == "pickle" else "must hold tensors and plain values alone"
    with pytest.raises(UsageError, match=holds):
        load_checked(lambda path: torch.load(path, weights_only=None), str(last))
    assert not marker.exists()


@pytest.mark.parametrize("named", [False, True])
def test_no_other_checkpoint_is_read_in_the_place_of_one_that_holds_code_or_is_named(
    named: bool, begun: Path, folders: list[Path]
) -> None:
    if named:
        flip_weight(begun / "checkpoint_best.pt", random.Random(1))
    else:
        torch.save({"model": Making(str(begun / "marker"))}, begun / "checkpoint_last.pt")
    more = ("--restore-file", str(begun / "checkpoint_best.pt")) if named else ()
    assert run(tiny_training(folders, begun, *EVERY_SECOND, *more), begun / "log") == [1]
    last = (begun / "log").read_text().splitlines()[-1]
    assert ("checkpoint_best.pt is damaged" if named else "error: a checkpoint must hold tensors") in last
    assert not (begun / "marker").exists()


def test_a_run_whose_optimizer_has_flags_of_the_old_kind_is_resumed(folders: list[Path], tmp_path: Path) -> None:
    for epochs in ("1", "2"):
        flags = (*FLAGS, "--optimizer", "adafactor", "--max-epoch", epochs)
        assert run(tiny_training(folders, tmp_path / "run", *flags), tmp_path / "log") == [0]
    assert "Loaded checkpoint" in (tmp_path / "log").read_text()


def test_a_full_disk_ends_training_with_one_sentence_and_the_checkpoints_of_before(
    folders: list[Path], tmp_path: Path
) -> None:
    command, log = tiny_training(folders, tmp_path / "run", *FLAGS, "--max-epoch", "2"), tmp_path / "log"
    fault = functools.partial(fail, "write", errno.ENOSPC, 400, 10**6)
    assert run(command, log, fault=fault) == [1]
    assert log.read_text().splitlines()[-1].startswith("fairseq-train: error: --save-dir must take a whole checkpoint")
    assert "Traceback" not in log.read_text()
    left = {path.name: read(path) for path in (tmp_path / "run").iterdir()}
    assert "checkpoint_last.pt" in left
    assert run(command, log) == [0]
    assert run(tiny_training(folders, tmp_path / "whole", *FLAGS, "--max-epoch", "2"), tmp_path / "whole.log") == [0]
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def without(state: dict[str, Any], group: str, **values: Any) -> None:
    state["cfg"][group] = values or None


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda state: state["cfg"].pop("model"), "is of no model"),
        (lambda state: without(state, "model"), "is of no model"),
        (lambda state: without(state, "model", _name="unheard_of"), "is of the unknown model unheard_of"),
        (lambda state: without(state, "task", _name="unheard_of"), "is of the unknown task unheard_of"),
        (lambda state: without(state, "task"), "is of no task"),
        (lambda state: state.update(model=[1, 2]), "holds no weights by their names"),
        (lambda state: state.pop("model"), "holds no weights by their names"),
        (lambda state: state.update(cfg=None), "holds no settings of its model"),
    ],
)
def test_a_checkpoint_of_an_unknown_model_is_one_sentence(change: Any, wrong: str, begun: Path) -> None:
    path = begun / "checkpoint_last.pt"
    state = read(path)
    change(state)
    torch.save(state, path)
    with pytest.raises(UsageError, match=f"^--path must name a checkpoint .* known here: {path} {wrong}$"):
        checkpoint_utils.load_model_ensemble_and_task([str(path)])


@pytest.mark.parametrize("place", ["cfg", "args"])
def test_settings_of_a_checkpoint_are_values_and_nothing_is_computed_for_them(place: str, tmp_path: Path) -> None:
    """As from the environment of whoever loads it."""
    path, secret = tmp_path / "checkpoint.pt", "${oc.env:PATH}"
    held = {"task": {"data": ["a", secret]}} if place == "cfg" else argparse.Namespace(data=secret)
    torch.save({**STATE, "args": None, "cfg": None, place: held}, path)
    with pytest.raises(UsageError, match=rf"values: {path} has '\${{oc\.env:PATH}}', to be computed$"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_a_file_that_is_no_dictionary_is_one_sentence(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(UsageError, match=r"must be a dictionary: .*list\.pt holds"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "list.pt"))
