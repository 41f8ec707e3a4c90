"""A run that is killed and resumed goes on as if nothing had happened, in every epoch and on every rank.

fairseq draws the order of samples when it makes an iterator, from the seed and from the epoch of that moment:
the first epoch in an uninterrupted run, and the current one in a resumed run, whose batches are then others.
Here a resumed run makes its iterators as the uninterrupted one has made them. What else it needs is below it:
the iterators' flags, the meters, and the state of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.fairseq_dataset import EpochListening
from fairseq.data.iterators import EpochBatchIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import meters, metrics
from fairseq.trainer import Trainer
from torch import distributed

from fairseq_ms.host.wrapping import wrap


def install() -> None:
    """Have fairseq resume every run this way; calling it again does nothing."""
    wrap(Trainer, "get_train_iterator", _as_uninterrupted)
    wrap(Trainer, "load_checkpoint", _with_meters)
    wrap(checkpoint_utils, "save_checkpoint", _with_all_ranks)
    wrap(EpochBatchIterator, "_get_iterator_for_epoch", _in_its_own_epoch)
    distributed_utils._broadcast_object_slow = _broadcast


def _as_uninterrupted(
    original: Callable[..., Any], trainer: Any, epoch: int, combine: bool = True, load_dataset: bool = True, **more: Any
) -> Any:
    """``Trainer.get_train_iterator``, which loads the data when a run starts and where every epoch has its own.

    A run that starts later than in epoch 1 repeats what the uninterrupted one did: it loads the data and makes an
    iterator in epoch 1, and asks for one again in the current epoch. Whether that is the same iterator is the
    task's decision. Data that is loaded for every epoch (``DATA1:DATA2``) is ordered by epoch anyway.
    """
    repeat = load_dataset and epoch > 1 and not more.get("disable_iterator_cache", False)
    if repeat:
        original(trainer, 1, combine=combine, load_dataset=True, **more)
    iterator = original(trainer, epoch, combine=combine, load_dataset=load_dataset and not repeat, **more)
    # What is made when a checkpoint is read has to know the flag that fairseq passes only later.
    iterator.fixes_batches = trainer.cfg.distributed_training.fix_batches_to_gpus
    if repeat:
        iterator.epoch = epoch
        if callable(getattr(iterator, "batch_sampler", None)):
            iterator._frozen_batches = None
        iterator.dataset.set_epoch(epoch)
    return iterator


def _in_its_own_epoch(
    original: Callable[..., Any],
    iterator: Any,
    epoch: int,
    shuffle: bool,
    fix_batches_to_gpus: bool | None = None,
    offset: int = 0,
) -> Any:
    """``EpochBatchIterator._get_iterator_for_epoch`` without what is left of another epoch.

    fairseq keeps a data loader from its first epoch on: with that epoch's ``--curriculum``, and with workers whose
    copies of the dataset stay in that epoch.
    """
    if fix_batches_to_gpus is None:
        fix_batches_to_gpus = getattr(iterator, "fixes_batches", False)
    sampler = getattr(iterator, "epoch_batch_sampler", None)
    if sampler is not None:
        sampler.shuffle, sampler.fix_batches_to_gpus = shuffle, fix_batches_to_gpus
    listens = getattr(type(iterator.dataset), "set_epoch", None) is not EpochListening.set_epoch
    if listens and iterator.num_workers > 0:
        iterator.dataloader = None
    return original(iterator, epoch, shuffle, fix_batches_to_gpus=fix_batches_to_gpus, offset=offset)


def _with_meters(
    original: Callable[..., Any],
    trainer: Any,
    filename: str,
    reset_optimizer: bool = False,
    reset_lr_scheduler: bool = False,
    optimizer_overrides: Any = None,
    reset_meters: bool = False,
) -> Any:
    """``Trainer.load_checkpoint``, which drops all meters between two epochs, even those that go on over them.

    Then the first loss that is printed would be the mean of fewer updates than ``--log-interval``. Speeds are this
    process' own: fairseq means to begin them anew within an epoch, but looks for them among the meters' names.
    """
    state = original(trainer, filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters)
    if state is not None and not reset_meters and "metrics" in state:
        place = state["train_iterator"]
        if place.get("version", 1) >= 2 and place["iterations_in_epoch"] == 0:
            metrics.load_state_dict(state["metrics"])
            metrics.reset_meters("train")
        for meter in (metrics.get_meters("default") or {}).values():
            if isinstance(meter, meters.TimeMeter):
                meter.reset()
    return state


def _with_all_ranks(original: Callable[..., Any], cfg: Any, trainer: Any, *args: Any, **more: Any) -> Any:
    """``save_checkpoint``, which all ranks call before one of them writes.

    Not ``Trainer.consolidate_optimizer``: a rank that fails calls that alone, and would wait for the others.
    """
    if not cfg.no_save and hasattr(trainer.task, "before_checkpoint"):
        trainer.task.before_checkpoint()
    return original(cfg, trainer, *args, **more)


def _broadcast(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """How the rank that reads a checkpoint shows it to the others.

    fairseq sends it through ``torch.load``, whose default since torch 2.6 is to refuse what a configuration is
    made of, so that no run of several processes could be resumed.
    """
    objects = [obj]
    distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
    return objects[0]
