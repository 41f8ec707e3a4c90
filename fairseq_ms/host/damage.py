"""A damaged checkpoint is recognised before it is read, and training goes on from the newest one that is intact.

torch reads an archive without its checksums, so that a flipped bit would become a weight.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from fairseq_ms.errors import UsageError
from fairseq_ms.host.wrapping import wrap

logger = logging.getLogger(__name__)

# How files began that torch wrote before it wrote archives; they hold no checksums.
_BEFORE_ARCHIVES = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_ARCHIVE = b"PK\x03\x04"

# Found intact and about to be read, so that large files are not read twice for it.
_about_to_be_read: set[str] = set()


def install() -> None:
    """Have fairseq check every checkpoint that it reads; calling it again does nothing."""
    # The flags of fairseq's older optimizers and schedulers, among them sgd and adafactor: names and values.
    torch.serialization.add_safe_globals([argparse.Namespace])
    wrap(checkpoint_utils, "load_checkpoint_to_cpu", _checked)
    wrap(Trainer, "load_checkpoint", _from_the_newest_intact)


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
        # What holds no checksum of its own is looked at by torch, which leaves the weights on the disk.
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return None
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError:
        return None
    except Exception as error:  # a garbled archive makes zipfile raise nearly everything
        return f"its archive cannot be read: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _checked(original: Callable[..., Any], path: str, *args: Any, **settings: Any) -> Any:
    """``load_checkpoint_to_cpu``, with one sentence for what is damaged or holds code."""
    local = PathManager.get_local_path(path)
    known = local in _about_to_be_read or not os.path.isfile(local)
    _about_to_be_read.discard(local)
    wrong = None if known else defect(local)
    if wrong is not None:
        raise UsageError(
            f"a checkpoint must be a file that fairseq-train wrote, unchanged: {path} is damaged ({wrong})"
        )
    try:
        with _without_code():
            return original(path, *args, **settings)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|[Uu]nsupported (?:class|operand)) (\S+)", str(error))
        raise UsageError(
            "a checkpoint must hold tensors and plain values alone, since anything else could run code: "
            f"{path} holds {found[1] if found else 'others'}"
        ) from error


@contextlib.contextmanager
def _without_code() -> Iterator[None]:
    """Within, ``torch.load`` reads tensors and plain values alone, also where fairseq's main asks it not to."""
    load = torch.load
    torch.load = functools.partial(_load_weights, load)
    try:
        yield
    finally:
        torch.load = load


def _load_weights(load: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    return load(*args, **{**settings, "weights_only": True})


def _from_the_newest_intact(original: Callable[..., Any], trainer: Any, filename: str, *args: Any, **more: Any) -> Any:
    """``Trainer.load_checkpoint``, which all ranks call, and in which they read the same file."""
    save_dir = trainer.cfg.checkpoint.save_dir
    # A checkpoint in several parts has to fit together, and the user's own --restore-file is read or refused.
    last = os.path.join(save_dir, "checkpoint_last.pt")
    if filename == last and not trainer.checkpoint_suffix and os.path.isfile(last):
        ranks = trainer.data_parallel_world_size
        found = _newest_intact(last) if trainer.data_parallel_rank == 0 else None
        if ranks > 1:
            found = distributed_utils.broadcast_object(
                found, src_rank=0, group=trainer.data_parallel_process_group, dist_device=trainer.device
            )
        assert found is not None
        filename, problem = found
        if problem is not None:
            raise UsageError(problem)
    return original(trainer, filename, *args, **more)


def _newest_intact(last: str) -> tuple[str, str | None]:
    """The checkpoint to go on from, and the sentence to end with when there is none."""
    wrong = defect(last)
    if wrong is None:
        _about_to_be_read.add(last)
        return last, None
    for updates, path in _others(last):
        also = defect(path)
        if also is None:
            logger.warning(
                f"{last} is damaged ({wrong}): going on from {path}, after update {updates}, which is the newest "
                "intact checkpoint in --save-dir"
            )
            return path, None
        logger.warning(f"{path} is damaged ({also})")
    return last, (
        f"--save-dir must hold an intact checkpoint to go on from: {last} is damaged ({wrong}), and there is no other "
        "(remove it to begin anew)"
    )


def _others(last: str) -> list[tuple[int, str]]:
    """The other checkpoints of a run's folder that training can go on from, newest first, by their updates.

    Weights stay on the disk; what cannot be read so far is left out.
    """
    found = []
    for path in sorted(Path(last).parent.glob("checkpoint*.pt")):
        if str(path) == last:
            continue
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            if "train_iterator" in state["extra_state"]:
                found.append((int(state["optimizer_history"][-1]["num_updates"]), str(path)))
        except Exception as error:  # garbled archives make torch raise nearly everything
            logger.warning(f"{path} cannot be read ({_first_line(error)})")
    return sorted(found, reverse=True)
