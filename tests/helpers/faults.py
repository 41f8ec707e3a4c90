"""Faults that a training meets: its process is struck by a signal, its disk fails, or a file of it is damaged.

``strike`` and ``fail`` are called in the process before it trains, with the number of its rank as the last argument.
"""

from __future__ import annotations

import functools
import io
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq.trainer import Trainer

import fairseq_ms.host  # noqa: F401  (registers the plugin, which --user-dir only does where it imports it first)
from fairseq_ms.tools import whole_files

DISK = ("write", "fsync", "replace")


def strike(moment: str, count: int, signum: int, ranks: tuple[int, ...], rank: int) -> None:
    """Send this process a signal if its rank is among ``ranks``.

    ``moment`` is "forward", "update", "saving", "validation" or "between epochs", and ``count`` says which of its kind.
    """
    if rank not in ranks:
        return

    act = functools.partial(os.kill, os.getpid(), signum)
    turn = _turn(count, act)
    if moment == "forward":
        # No hook: what has one is called, where it would be fused with what is beside it, which rounds otherwise.
        _before(torch.nn.Module, "__call__", turn)
    elif moment == "update":
        _after(Trainer, "train_step", turn)
    elif moment == "saving":
        for call in DISK:
            _disk(call, turn)
    elif moment == "validation":
        _before(Trainer, "valid_step", turn)
    else:
        assert moment == "between epochs", moment
        # The first epoch of a process begins it.
        _before(Trainer, "begin_epoch", _turn(count + 1, act))


def fail(call: str, number: int, count: int, times: int, rank: int) -> None:
    """Let ``times`` calls of the disk fail with the error ``number``, from the ``count``-th on."""
    seen = 0

    def turn() -> None:
        nonlocal seen
        seen += 1
        if count <= seen < count + times:
            raise OSError(number, os.strerror(number))

    _disk(call, turn)
    # Nobody waits for the pauses between attempts.
    whole_files._PAUSES = (0.0, 0.0)


def _turn(count: int, act: Callable[[], Any]) -> Callable[[], None]:
    """A function that acts when it is called for the ``count``-th time."""
    left = [count]

    def turn() -> None:
        left[0] -= 1
        if left[0] == 0:
            act()

    return turn


def _before(owner: Any, name: str, turn: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def struck(*args: Any, **settings: Any) -> Any:
        turn()
        return original(*args, **settings)

    setattr(owner, name, struck)


def _after(owner: Any, name: str, turn: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def struck(*args: Any, **settings: Any) -> Any:
        result = original(*args, **settings)
        turn()
        return result

    setattr(owner, name, struck)


def _disk(call: str, turn: Callable[[], None]) -> None:
    """Take a turn in every such call by which a checkpoint is written; a write has written half by then."""
    if call == "write":
        vars(whole_files)["open"] = functools.partial(_opened, turn)
    else:
        _before(os, call, turn)


def _opened(turn: Callable[[], None], path: str, mode: str) -> Any:
    return _Struck(path, turn) if "w" in mode else open(path, mode)


class _Struck(io.BufferedWriter):
    """A file that takes a turn in the middle of every write."""

    def __init__(self, path: str, turn: Callable[[], None]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.turn = turn

    def write(self, data: Any) -> int:
        parts = memoryview(data).cast("B")
        half = len(parts) // 2
        super().write(parts[:half])
        self.flush()
        self.turn()
        super().write(parts[half:])
        return len(parts)


Damage = Callable[[Path, random.Random], None]


def cut(path: Path, rng: random.Random) -> None:
    """Its end is missing."""
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def flip(path: Path, rng: random.Random) -> None:
    """One bit is another."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def flip_weight(path: Path, rng: random.Random) -> None:
    """One bit of a weight, which torch would load."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.file_size if "/data/" in entry.filename else 0)
    content[entry.header_offset + 2 * len(entry.filename) + 100] ^= 4
    path.write_bytes(content)


def zero(path: Path, rng: random.Random) -> None:
    """A part of it has never reached the disk."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.randint(1, 4096))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def garble(path: Path, rng: random.Random) -> None:
    """It is something else of the same size."""
    path.write_bytes(rng.randbytes(path.stat().st_size))


class Making:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.folder,)
