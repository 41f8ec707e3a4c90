"""Checkpoints that are complete or absent: what reaches the disk, in which order, and what is left when that fails."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_ms.errors import UsageError
from fairseq_ms.host import writing
from tests.faults.injections import DISK, fail
from tests.helpers.cli import run_cli
from tests.helpers.corpus import train_command, write_corpus
from tests.helpers.forked import run
from tests.helpers.resumed import assert_same_weights, equal, tiny_training, write_parts

STATE = {"model": {"weight": torch.arange(5000.0)}, "step": 3}
MODEL = ("--arch", "vanilla_lm", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "8", "--decoder-layers", "1")
TINY = (*MODEL, "--decoder-attention-heads", "1", "--max-epoch", "2", "--save-interval-updates", "2")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """For faults that are injected into this process: what they replace is put back."""
    monkeypatch.setattr(writing, "_PAUSES", writing._PAUSES)
    monkeypatch.setattr(writing, "open", open, raising=False)
    for call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, getattr(os, call))
    return monkeypatch


def save(path: Path, state: Any = STATE) -> None:
    checkpoint_utils.torch_persistent_save(state, str(path))


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
    fail(call, number, 1, 100, None, 0)
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
    fail(call, errno.EIO, 1, 2, None, 0)
    save(tmp_path / "checkpoint_last.pt")
    assert (tmp_path / "checkpoint_last.pt").stat().st_size == (tmp_path / "expected.pt").stat().st_size
    assert equal(read(tmp_path / "checkpoint_last.pt"), STATE)


def test_what_cannot_be_saved_is_a_bug_and_keeps_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle") as caught:
        save(tmp_path / "checkpoint_last.pt", lambda: None)
    assert not isinstance(caught.value, UsageError)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_in_the_background_is_that_of_its_moment_and_has_all_its_names(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    first, last = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    checkpoint_utils.torch_persistent_save({"weight": weight}, str(first), async_write=True)
    assert PathManager.copy(str(first), str(last), overwrite=True)
    weight += 1
    PathManager.async_close()
    for path in (first, last):
        assert equal(read(path), {"weight": torch.zeros(1000)})
    assert sorted(os.listdir(tmp_path)) == ["checkpoint1.pt", "checkpoint_last.pt"]


def test_a_failure_in_the_background_ends_the_run_at_the_next_checkpoint(
    tmp_path: Path, disk: pytest.MonkeyPatch
) -> None:
    fail("fsync", errno.ENOSPC, 1, 1, None, 0)
    checkpoint_utils.torch_persistent_save(STATE, str(tmp_path / "checkpoint1.pt"), async_write=True)
    with pytest.raises(UsageError, match=r"checkpoint1\.pt could not be written"):
        checkpoint_utils.torch_persistent_save(STATE, str(tmp_path / "checkpoint2.pt"), async_write=True)
    PathManager.async_close()
    assert os.listdir(tmp_path) == []


def with_iopath(folder: Path, rank: int) -> None:
    """fairseq asks whether there is such a package, which is not needed here."""
    import sys

    (folder / "iopath").mkdir(exist_ok=True)
    (folder / "iopath" / "__init__.py").touch()
    sys.path.insert(0, str(folder))


def test_a_run_that_writes_in_the_background_ends_with_the_same_checkpoint_and_is_resumed(tmp_path: Path) -> None:
    folders = write_parts(tmp_path / "corpus")[:1]
    fault = functools.partial(with_iopath, tmp_path)
    assert run(tiny_training(folders, tmp_path / "whole", *TINY), tmp_path / "whole.log") == [0]
    for epochs in ("1", "2"):
        flags = (*TINY, "--write-checkpoints-asynchronously", "--max-epoch", epochs)
        log = tmp_path / f"{epochs}.log"
        assert run(tiny_training(folders, tmp_path / "background", *flags), log, fault=fault) == [0], log.read_text()
    assert "Loaded checkpoint" in log.read_text()
    assert_same_weights(tmp_path / "whole", tmp_path / "background")
    assert {path.name for path in (tmp_path / "background").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_a_full_disk_ends_training_with_one_sentence_and_the_checkpoints_of_before(tmp_path: Path) -> None:
    folders = write_parts(tmp_path / "corpus")[:1]
    command, log = tiny_training(folders, tmp_path / "run", *TINY), tmp_path / "log"
    fault = functools.partial(fail, "write", errno.ENOSPC, 400, 10**6, None)
    assert run(command, log, fault=fault) == [1]
    assert log.read_text().splitlines()[-1].startswith("fairseq-train: error: --save-dir must take a whole checkpoint")
    assert "Traceback" not in log.read_text()
    left = {path.name: read(path) for path in (tmp_path / "run").iterdir()}
    assert "checkpoint_last.pt" in left
    assert run(command, log) == [0]
    assert run(tiny_training(folders, tmp_path / "whole", *TINY), tmp_path / "whole.log") == [0]
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def test_what_a_killed_run_left_half_written_is_gone_when_the_next_one_begins(tmp_path: Path) -> None:
    for name in ("checkpoint_1_20.pt.tmp", "checkpoint.best_loss_3.1250.pt.tmp", "mine.tmp", "checkpoint1.pt"):
        (tmp_path / name).touch()
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint1.pt", "mine.tmp"]


def test_a_folder_that_cannot_be_written_to_and_a_missing_package_are_one_sentence_before_training(
    tmp_path: Path,
) -> None:
    data = write_corpus(tmp_path)
    done = run_cli(*train_command("vanilla_lm", data, Path("/proc/none")), check=False)
    assert done.stderr.splitlines()[-1].startswith("fairseq-train: error: --save-dir must be a folder in which files")
    flags = ("--write-checkpoints-asynchronously",)
    done = run_cli(*train_command("vanilla_lm", data, tmp_path / "run", *flags), check=False)
    needs = "--write-checkpoints-asynchronously needs the package iopath: pip install iopath"
    assert done.stderr.splitlines() == [f"fairseq-train: error: {needs}"]
    assert done.returncode == 1


def test_installing_twice_is_installing_once() -> None:
    before = checkpoint_utils.torch_persistent_save, checkpoint_utils.save_checkpoint, PathManager.copy
    writing.install()
    assert before == (checkpoint_utils.torch_persistent_save, checkpoint_utils.save_checkpoint, PathManager.copy)


def test_torch_writes_an_archive_that_other_programs_can_check() -> None:
    """``host/damage.py`` relies on the checksums in it."""
    import zipfile

    archive = io.BytesIO()
    torch.save(STATE, archive)
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        assert all(entry.CRC for entry in opened.infolist() if entry.file_size > 8)
