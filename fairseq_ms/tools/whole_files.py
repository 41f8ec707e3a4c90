"""A checkpoint's file is complete or absent, and is recognised when it is damaged; nothing that it holds runs.

torch renames nothing and syncs nothing, and reads an archive without its checksums, so that a flipped bit would become
a weight.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pickle
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fairseq_ms.errors import UsageError

logger = logging.getLogger(__name__)

# What another attempt does not mend. The others have as many attempts, and the same seconds between, as in fairseq.
_FINAL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
_PAUSES = (2.5, 2.5)
# How files began that torch wrote before it wrote archives; they hold no checksums.
_BEFORE_ARCHIVES = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_ARCHIVE = b"PK\x03\x04"
_CHECKSUMS = "checksums.json"


def write(path: str, fill: Callable[[BinaryIO], Any], flag: str = "--save-dir") -> None:
    """Write a whole file by ``fill(file)``; raises UsageError when that cannot be, with the old file in its place.

    Args:
        flag: that named the folder
    """
    for pause in (*_PAUSES, None):
        try:
            _write_once(path, fill)
            return
        except Exception as error:
            cause = os_error(error)
            if cause is None:
                raise
            if pause is None or cause.errno in _FINAL:
                raise UsageError(unwritten(path, cause, flag)) from error
            logger.warning(f"writing {path} failed ({cause}), trying again in {pause} seconds")
            time.sleep(pause)


def unwritten(path: object, cause: BaseException, flag: str) -> str:
    """The sentence for a checkpoint that the disk has no room for, or does not take."""
    reason = " ".join(str(getattr(cause, "strerror", None) or cause).split())
    return (
        f"{flag} must take a whole checkpoint: {path} could not be written ({reason}); "
        "the checkpoints before it are untouched, and the same command goes on from them"
    )


def _write_once(path: str, fill: Callable[[BinaryIO], Any]) -> None:
    """The file has its name when it has reached the disk, and vanishes on an error.

    The folder is synced too: it holds the name, and until then a loss of power brings the old file back.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(os.path.dirname(path) or ".")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems sync no folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def os_error(error: BaseException | None) -> OSError | None:
    """The failure of the disk behind an error: torch raises one of its own while it closes an archive."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def defect(path: str) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if it is as it was written. Runs nothing of what it holds.

    It reads the whole file, at the speed of the disk. Raises FileNotFoundError.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(_BEFORE_ARCHIVES))
            if start == _BEFORE_ARCHIVES:
                return None
            if not start:
                return "it is empty"
            if not start.startswith(_ARCHIVE):
                return "it does not begin like a checkpoint"
            if not zipfile.is_zipfile(file):
                return "its end is missing"
            with zipfile.ZipFile(file) as archive:
                record = archive.testzip()
        if record is not None:
            return f"the checksum of {record} is wrong"
        # What holds no checksum of its own is looked at by torch.
        read(path)
        return None
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError:
        return None
    except Exception as error:  # a garbled archive makes zipfile raise nearly everything
        return f"its archive cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}"


def read(path: str) -> Any:
    """What a checkpoint holds; weights stay on the disk. Raises UnpicklingError for anything that could run code."""
    return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


def check(path: str) -> None:
    """Raise UsageError for a damaged checkpoint."""
    if (wrong := defect(path)) is not None:
        raise UsageError(f"a checkpoint must be a file that training wrote, unchanged: {path} is damaged ({wrong})")


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder's files beside them."""
    sums = {file.name: _checksum(file) for file in sorted(folder.iterdir()) if file.name != _CHECKSUMS}
    write(str(folder / _CHECKSUMS), lambda file: file.write(json.dumps(sums).encode()), "--out")


def check_folder(folder: Path) -> None:
    """Raise UsageError for a folder whose files are not those that it has checksums of, if it has any."""
    if not (folder / _CHECKSUMS).is_file():
        return
    try:
        sums = json.loads((folder / _CHECKSUMS).read_bytes())
        wrong = next((name for name in sums if _checksum(folder / name) != sums[name]), None)
        reason = "its checksum is wrong"
    except (OSError, ValueError, TypeError) as error:
        wrong, reason = _CHECKSUMS, str(error)
    if wrong is not None:
        raise UsageError(
            f"a checkpoint must be as training wrote it, unchanged: {folder / wrong} is damaged ({reason})"
        )


def _checksum(file: Path) -> int:
    """Its CRC-32, as an archive has it of its parts."""
    found = 0
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            found = zlib.crc32(block, found)
    return found
