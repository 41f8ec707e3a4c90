"""A resumed run reads the training data that it began with, to the bit, wherever they lie.

fairseq's format has no checksum, so that a token which has become another one of the dictionary would be trained on,
and data that were prepared anew would be continued at a place that means nothing in them. Checkpoints therefore hold
the checksums of the training data, and a run that is resumed compares them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from fairseq import utils
from fairseq.trainer import Trainer

from fairseq_ms.errors import UsageError
from fairseq_ms.host import data_files
from fairseq_ms.host.wrapping import wrap

# Not "training_data", where checkpoints once held other checksums, by absolute path.
_KEY = "data_checksums"

# What the checkpoint holds.
_expected: dict[str, int] = {}


def install() -> None:
    """Have ``fairseq-train`` compare its data this way; calling it again does nothing."""
    wrap(Trainer, "load_checkpoint", _expecting)
    wrap(Trainer, "get_train_iterator", _comparing)
    wrap(Trainer, "save_checkpoint", _with_checksums)


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
    for name, path, checksum in _opened(trainer):
        if _expected.get(name, checksum) != checksum:
            raise UsageError(
                f"DATA must be what the checkpoint was trained on: {path}.bin or {path}.idx has changed since "
                "(--reset-dataloader begins a new epoch of the data as they are)"
            )
    return iterator


def _with_checksums(original: Callable[..., Any], trainer: Any, filename: str, extra_state: dict[str, Any]) -> Any:
    """``Trainer.save_checkpoint``."""
    found = {name: checksum for name, _, checksum in _opened(trainer)}
    return original(trainer, filename, {**extra_state, _KEY: {**_expected, **found}})


def _opened(trainer: Any) -> Iterator[tuple[str, str, int]]:
    """The training data opened so far: their name wherever they lie, their path, and their checksum.

    The name is the number of their folder in DATA, and that of the split.
    """
    folders = [os.path.abspath(folder) for folder in utils.split_paths(getattr(trainer.cfg.task, "data", None) or "")]
    subset = os.path.basename(trainer.cfg.dataset.train_subset)
    for path, checksum in data_files.checksums.items():
        folder, name = os.path.split(path)
        if folder in folders and name.startswith(subset):
            yield f"{folders.index(folder)}/{name}", path, checksum
