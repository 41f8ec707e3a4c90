"""A checkpoint is complete or absent, also after a loss of power, on a full disk and when written in the background.

fairseq renames what may not have reached the disk yet; after a failed attempt it goes on behind the half of a file
that the attempt has left; and ``--write-checkpoints-asynchronously`` writes in place, and no ``checkpoint_last.pt``.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import importlib.util
import io
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager

from fairseq_ms.errors import UsageError
from fairseq_ms.host.wrapping import wrap

logger = logging.getLogger(__name__)

# What another attempt does not mend. The others have as many attempts, and the same seconds between, as in fairseq.
_FINAL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
_PAUSES = (2.5, 2.5)
_LEFTOVER = re.compile(r"(checkpoint|crash).*\.pt\.tmp")


def install() -> None:
    """Have fairseq write every checkpoint this way; calling it again does nothing."""
    wrap(checkpoint_utils, "torch_persistent_save", _save)
    wrap(checkpoint_utils, "save_checkpoint", _with_all_names)
    wrap(checkpoint_utils, "verify_checkpoint_directory", _without_leftovers)
    wrap(PathManager, "copy", _copy)
    wrap(PathManager, "async_close", _close)
    wrap(distributed_utils, "call_main", _with_iopath)


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A file to write, which replaces the one at ``path`` when it has reached the disk, or vanishes on an error.

    The folder is synced too: it holds the name, and until then a loss of power brings the old file back.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(os.path.dirname(path) or ".")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write(path: str, fill: Callable[[BinaryIO], Any]) -> None:
    """Write a whole file by ``fill(file)``; raises UsageError when that cannot be, with the old file in its place."""
    for pause in (*_PAUSES, None):
        try:
            with whole_file(path) as file:
                fill(file)
            return
        except Exception as error:
            cause = _os_error(error)
            if cause is None:
                raise
            if pause is None or cause.errno in _FINAL:
                raise UsageError(
                    f"--save-dir must take a whole checkpoint: {path} could not be written ({cause.strerror or cause})"
                    "; the checkpoints before it are untouched, and the same command goes on from them"
                ) from error
            logger.warning(f"writing {path} failed ({cause}), trying again in {pause} seconds")
            time.sleep(pause)


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


def _os_error(error: BaseException | None) -> OSError | None:
    """The failure of the disk behind an error: torch raises one of its own while it closes an archive."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


class _Background:
    """Writes files in a thread, one after the other and in the order in which they were given."""

    def __init__(self) -> None:
        self.thread: ThreadPoolExecutor | None = None
        self.unfinished: list[Future[None]] = []

    def add(self, job: Callable[..., None], *args: Any) -> None:
        self.thread = self.thread or ThreadPoolExecutor(1, "checkpoints")
        self.unfinished.append(self.thread.submit(job, *args))

    def wait(self) -> None:
        """Until all is written; raises what a job has raised."""
        while self.unfinished:
            self.unfinished.pop(0).result()


_background = _Background()


def _save(original: Callable[..., Any], obj: Any, filename: str, async_write: bool = False) -> None:
    """``torch_persistent_save``."""
    if not PathManager.supports_rename(filename):
        original(obj, filename, async_write)
    elif async_write:
        # No more than one checkpoint waits in memory.
        _background.wait()
        archive = io.BytesIO()
        torch.save(obj, archive)
        _background.add(write, filename, lambda file: file.write(archive.getbuffer()))
    else:
        write(filename, lambda file: torch.save(obj, file))


def _copy(original: Callable[..., Any], src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """``PathManager.copy``, behind the file that it copies."""
    if not PathManager.supports_rename(dst_path) or (os.path.exists(dst_path) and not overwrite):
        return original(src_path, dst_path, overwrite=overwrite)
    if _background.unfinished:
        _background.add(_copy_whole, src_path, dst_path)
    else:
        _copy_whole(src_path, dst_path)
    return True


def _copy_whole(src_path: str, dst_path: str) -> None:
    def fill(file: BinaryIO) -> None:
        with open(src_path, "rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)

    write(dst_path, fill)


def _close(original: Callable[[], bool]) -> bool:
    """``PathManager.async_close``, which fairseq calls at the end of training."""
    _background.wait()
    return original()


def _with_all_names(original: Callable[..., Any], cfg: Any, *args: Any, **more: Any) -> Any:
    """``save_checkpoint``, which writes only the first of a checkpoint's names in the background.

    Without ``checkpoint_last.pt`` the run would not be resumed.
    """
    if cfg.write_checkpoints_asynchronously:
        # The trainer has this setting from elsewhere.
        cfg = copy.copy(cfg)
        cfg.write_checkpoints_asynchronously = False
    return original(cfg, *args, **more)


def _without_leftovers(original: Callable[..., None], save_dir: str) -> None:
    """``verify_checkpoint_directory``, at the beginning of a run; removes what a killed one has left half written."""
    try:
        original(save_dir)
        leftovers = [path for path in Path(save_dir).iterdir() if _LEFTOVER.fullmatch(path.name)]
        for path in leftovers:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"--save-dir must be a folder in which files can be made: got {save_dir} ({error.strerror})"
        ) from error


def _with_iopath(original: Callable[..., Any], cfg: Any, main: Callable[..., Any], **settings: Any) -> Any:
    """``call_main``: without the package, fairseq would log an error and end well without any training."""
    if cfg.checkpoint.write_checkpoints_asynchronously and importlib.util.find_spec("iopath") is None:
        raise UsageError("--write-checkpoints-asynchronously needs the package iopath: pip install iopath")
    return original(cfg, main, **settings)
