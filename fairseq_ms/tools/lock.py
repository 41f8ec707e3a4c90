"""One training at a time writes to a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from fairseq_ms.errors import UsageError

NAME = "training.lock"


class FolderLock:
    """A folder that this process alone writes to; the kernel gives it back when the process ends, however that is.

    On file systems without locks, nothing is locked.
    """

    def __init__(self) -> None:
        self.file: IO[str] | None = None
        self.made: list[Path] = []

    def take(self, folder: Path, flag: str) -> None:
        """Make the folder if need be, and lock it; raises UsageError where that cannot be, or another has it."""
        self.release()
        try:
            self.made = [part for part in (folder, *folder.parents) if not part.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._lock(folder, flag)
        except OSError as error:
            self.release()
            raise UsageError(
                f"{flag} must be a folder in which files can be made: got {folder} ({error.strerror})"
            ) from error

    def _lock(self, folder: Path, flag: str) -> None:
        while self.file is None or os.fstat(self.file.fileno()).st_nlink == 0:  # its last owner has just removed it
            self.file = open(folder / NAME, "a")  # noqa: SIM115 (closed by release)
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    self.file.close()
                    self.file, self.made = None, []
                    raise UsageError(
                        f"{flag} must be a folder that no other training writes to: {folder} is in use "
                        f"({NAME} in it is locked until that process ends)"
                    ) from None
                return

    def release(self) -> None:
        """Give the folder back, and remove it where it was made and nothing has been written."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.file.name)
            self.file.close()
        with contextlib.suppress(OSError):
            for folder in self.made:
                folder.rmdir()
        self.file, self.made = None, []
