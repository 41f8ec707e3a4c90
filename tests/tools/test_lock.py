"""Of all processes one at a time writes to a folder, and nobody has to tidy up after one that has been killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import lock
from tests.helpers.cli import environment

HOLDING = """
import sys, time
from pathlib import Path
from fairseq_ms.tools.lock import FolderLock
held = FolderLock()
held.take(Path(sys.argv[1]), "--out")
print("held", flush=True)
time.sleep(300)
"""


def holding(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a folder."""
    command = [sys.executable, "-c", HOLDING, str(folder)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_folder_is_held_until_its_process_ends_however_that_is(signum: int, tmp_path: Path) -> None:
    process, own = holding(tmp_path), lock.FolderLock()
    try:
        with pytest.raises(
            UsageError, match=f"^--out must be a folder that no other training writes to: {tmp_path} is"
        ):
            own.take(tmp_path, "--out")
        assert (tmp_path / lock.NAME).exists()
    finally:
        os.kill(process.pid, signum)
        process.wait()
    own.take(tmp_path, "--out")
    own.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_anything_written_is_removed_and_one_that_was_there_is_not(tmp_path: Path) -> None:
    own = lock.FolderLock()
    for kept in (False, True):
        own.take(tmp_path / "a" / "b", "--out")
        if kept:
            (tmp_path / "a" / "b" / "checkpoint.pt").touch()
        own.release()
        assert (tmp_path / "a").exists() == kept
    own.take(tmp_path / "a" / "b", "--out")
    (tmp_path / "a" / "b" / "checkpoint.pt").unlink()
    own.release()
    assert (tmp_path / "a" / "b").exists()


def test_a_lock_that_its_owner_has_just_removed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it."""
    own, locked = lock.FolderLock(), fcntl.lockf
    times: list[object] = []

    def slowly(*args: object) -> None:
        if not times:
            (tmp_path / lock.NAME).unlink()
        times.append(args)
        locked(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "lockf", slowly)
    own.take(tmp_path, "--out")
    assert len(times) == 2
    assert (tmp_path / lock.NAME).exists()
    own.release()


def test_where_a_file_system_has_no_locks_a_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", fail)
    own = lock.FolderLock()
    own.take(tmp_path, "--out")
    own.release()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--out must be a folder in which files can be made: got .*/a \(Not a dir"):
        lock.FolderLock().take(tmp_path / "file" / "a", "--out")
