"""Files that appear under their final name only when complete, and small helpers around them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar

# An object of a JSON file, whatever it holds.
Json = dict[str, Any]
Thing = TypeVar("Thing")


class OtherFlagsNeeded(ValueError):
    """What the same command would meet again: nothing of its run is kept."""


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` only if the block ends without an error; otherwise nothing is left."""
    # A link stays one.
    target = path.resolve()
    part = part_of(target)
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def complete_text(path: Path) -> Iterator[IO[str]]:
    """A UTF-8 text file to write, ``complete`` in the same way."""
    with complete(path) as part, open(part, "w", encoding="utf-8", newline="\n") as file:
        yield file


def part_of(path: Path) -> Path:
    """A name for the file in the making, this process's own: a killed run's worker may still write another."""
    return path.with_name(f"{path.name}.part-{os.getpid()}")


def once_a_file(load: Callable[[Path], Thing]) -> Callable[[Path], Thing]:
    """``load``, whose result is kept until another file, or the same file with another time of change, is asked for."""
    kept = lru_cache(maxsize=1)(lambda path, changed: load(path))
    return lambda path: kept(path, path.stat().st_mtime_ns)


def write_json(path: Path, value: object) -> None:
    """Write `value` as readable JSON; complete or not at all."""
    # Bytes of a file's name that are not UTF-8 are escaped, as JSON itself escapes characters.
    with complete(path) as part, open(part, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, sort_keys=True)
        file.write("\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; ValueError names the file when it is damaged."""
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a readable JSON file ({error}).") from None


def parsed(text: str) -> Any:
    """What JSON says; ValueError also where it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file as lower-case hexadecimal digits."""
    return digest_of(path, "sha256")


def digest_of(path: Path, algorithm: str) -> str:
    """A digest of a file as lower-case hexadecimal digits, read in blocks."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 16):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system frees when the process ends, however it ends.

    ValueError when another process holds it.
    """
    with open(folder / "lock", "w", encoding="utf-8") as file:
        try:
            # Unlike flock's, this lock is not inherited by workers, which may outlive a killed run for a
            # moment.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--out: another run is working in {folder.parent}.") from None
        yield
