"""A resumed run reads the training data that it began with, to the bit.

fairseq's format has no checksum, so that a token which has become another one of the dictionary would be trained on,
and data that were prepared anew would be continued at a place that means nothing in them. Checkpoints therefore hold
the checksums of the training data, and a run that is resumed compares them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

from fairseq.data import indexed_dataset
from fairseq.trainer import Trainer

from fairseq_ms.errors import UsageError
from fairseq_ms.host.wrapping import wrap

_KEY = "training_data"
_CHUNK = 1 << 24

# Files that were opened, of those the checksums that were computed, and those that the checkpoint holds.
_opened: set[str] = set()
_checksums: dict[str, int] = {}
_expected: dict[str, int] = {}


def install() -> None:
    """Have ``fairseq-train`` compare its data this way; calling it again does nothing."""
    wrap(indexed_dataset, "make_dataset", _noting)
    wrap(Trainer, "load_checkpoint", _expecting)
    wrap(Trainer, "get_train_iterator", _comparing)
    wrap(Trainer, "save_checkpoint", _with_checksums)


def _noting(original: Callable[..., Any], path: str, *args: Any, **more: Any) -> Any:
    """``make_dataset``, which opens ``path``.bin and ``path``.idx."""
    dataset = original(path, *args, **more)
    for name in (f"{path}.bin", f"{path}.idx"):
        if os.path.isfile(name):
            _opened.add(os.path.abspath(name))
            _checksums.pop(os.path.abspath(name), None)
    return dataset


def _expecting(original: Callable[..., Any], trainer: Any, filename: str, *args: Any, **more: Any) -> Any:
    """``Trainer.load_checkpoint``, which comes before the training data are opened."""
    state = original(trainer, filename, *args, **more)
    _expected.clear()
    checkpoint = trainer.cfg.checkpoint
    # A model that is fine-tuned begins with an epoch of its own.
    if state is not None and not checkpoint.reset_dataloader and filename != checkpoint.finetune_from_model:
        _expected.update(state.get(_KEY, {}))
    return state


def _comparing(original: Callable[..., Any], trainer: Any, *args: Any, **more: Any) -> Any:
    """``Trainer.get_train_iterator``, which opens the training data; raises UsageError if they have changed."""
    iterator = original(trainer, *args, **more)
    subset = os.path.basename(trainer.cfg.dataset.train_subset)
    for name in _opened:
        if os.path.basename(name).startswith(subset) and name not in _checksums:
            _checksums[name] = _checksum(name)
            if _expected.get(name, _checksums[name]) != _checksums[name]:
                raise UsageError(
                    f"DATA must be what the checkpoint was trained on: {name} has changed since (--reset-dataloader "
                    "begins a new epoch of the data as they are)"
                )
    return iterator


def _with_checksums(original: Callable[..., Any], trainer: Any, filename: str, extra_state: dict[str, Any]) -> Any:
    """``Trainer.save_checkpoint``."""
    return original(trainer, filename, {**extra_state, _KEY: {**_expected, **_checksums}})


def _checksum(path: str) -> int:
    found = 0
    with open(path, "rb") as file:
        while part := file.read(_CHUNK):
            found = zlib.crc32(part, found)
    return found
