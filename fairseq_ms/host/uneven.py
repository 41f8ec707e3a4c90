"""The last update of an epoch counts all its batches, also where they do not suffice for every process.

With ``--update-freq``, a process can have a batch and then none. fairseq repeats an old batch there without its
gradient, and then takes the process's whole update for empty: its gradients are used, but its tokens are left out of
what their sum is divided by, and its losses out of the log.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from fairseq.trainer import Trainer

from fairseq_ms.host.wrapping import wrap

# In a batch that is repeated, since criterions may wait for the other processes in every batch.
_REPEATED = "repeated"


def install() -> None:
    """Have every trainer count this way; calling it again does nothing."""
    wrap(Trainer, "train_step", _with_repeated_batches)


def _with_repeated_batches(
    original: Callable[..., Any], trainer: Any, samples: list[Any], *args: Any, **settings: Any
) -> Any:
    """``Trainer.train_step``, with the batches of an update."""
    if not any(samples) or all(samples):
        return original(trainer, samples, *args, **settings)
    samples = [sample or {**trainer._dummy_batch, _REPEATED: True} for sample in samples]
    task = trainer.task
    task.train_step = functools.partial(_counting, task.train_step)
    try:
        return original(trainer, samples, *args, **settings)
    finally:
        del task.train_step


def _counting(original: Callable[..., Any], sample: dict[str, Any], *args: Any, **settings: Any) -> Any:
    """A task's ``train_step``, to which repeated batches are nothing."""
    if not sample.get(_REPEATED):
        return original(sample, *args, **settings)
    # Of the arguments behind the batch, the fifth is ``ignore_grad``.
    loss, size, logged = original(sample, *args[:4], **{**settings, "ignore_grad": True})
    return loss, _zero(size), {name: _zero(value) for name, value in logged.items()}


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if torch.is_tensor(value) else 0
