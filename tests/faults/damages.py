"""Files that are cut, garbled, or made to run code when they are read."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import torch

Damage = Callable[[Path, random.Random], None]


def cut(path: Path, rng: random.Random) -> None:
    """Its end is missing."""
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def flip(path: Path, rng: random.Random) -> None:
    """One bit is another."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
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


def malicious(path: Path, rng: random.Random) -> None:
    """A pickle that makes a folder beside the file, in one of the three forms in which torch reads pickles."""
    form = rng.choice(["archive", "old", "pickle"])
    content = {"model": Making(f"{path}.run")}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "archive")


class Making:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.folder,)


DAMAGES: dict[str, Damage] = {
    "cut off": cut,
    "one bit flipped": flip,
    "partly zero": zero,
    "garbled": garble,
    "malicious pickle": malicious,
}
