"""Faults that a process of ``fairseq-train`` meets: it is struck by a signal, or its disk fails.

Each function is called in the process before it trains, with the number of its rank as the last argument. When the
fault is met, a byte is added to the file ``met``.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq.trainer import Trainer

from fairseq_ms.host import checkpoints

MOMENTS = ("forward", "update", "saving", "validation", "between epochs", "any time")
DISK = ("write", "fsync", "replace")


def strike(moment: str, count: int, signum: int, ranks: tuple[int, ...], met: Path | None, rank: int) -> None:
    """Send this process a signal if its rank is among ``ranks``.

    ``moment`` is one of ``MOMENTS``, and ``count`` says which one of its kind; for "any time" it is milliseconds.
    """
    if rank not in ranks:
        return

    def act() -> None:
        _note(met)
        os.kill(os.getpid(), signum)

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
    elif moment == "between epochs":
        # The first epoch of a process begins it.
        _before(Trainer, "begin_epoch", _turn(count + 1, act))
    else:
        timer = threading.Timer(count / 1000, act)
        timer.daemon = True
        timer.start()


def fail(call: str, number: int, count: int, times: int, met: Path | None, rank: int) -> None:
    """Let ``times`` calls of the disk fail with the error ``number``, from the ``count``-th on."""
    seen = 0

    def turn() -> None:
        nonlocal seen
        seen += 1
        if count <= seen < count + times:
            if seen == count:
                _note(met)
            raise OSError(number, os.strerror(number))

    _disk(call, turn)
    # Nobody waits for the pauses between attempts.
    checkpoints._PAUSES = (0.0, 0.0)


def _note(met: Path | None) -> None:
    if met is not None:
        with open(met, "ab") as file:
            file.write(b".")


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
        vars(checkpoints)["open"] = functools.partial(_opened, turn)
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
