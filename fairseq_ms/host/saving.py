"""When a training saves, beside fairseq's own moments, when it stops, and when it has nothing left to do."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils

from fairseq_ms.errors import UsageError
from fairseq_ms.host import launch

logger = logging.getLogger(__name__)

# Seconds of training after which a checkpoint is due.
LONGEST = 15 * 60.0


def is_due(trainer: Any) -> bool:
    """Whether this process has trained for so long that its run has to save."""
    return time.monotonic() - trainer.saved_at >= LONGEST


def ends_last_epoch(cfg: Any, epoch_itr: Any, end_of_epoch: bool) -> bool:
    """Whether an update was the last of as many epochs as the run may have."""
    return bool(end_of_epoch and epoch_itr.next_epoch_idx > (cfg.optimization.max_epoch or math.inf))


def save_and_stop(
    original: Callable[..., Any],
    cfg: Any,
    trainer: Any,
    task: Any,
    epoch_itr: Any,
    valid_subsets: Any,
    end_of_epoch: bool,
) -> Any:
    """``validate_and_save``, which comes after every update: it also saves when that is due, or a signal has come.

    The last epoch's end is validated and saved, as the last update is, whatever the intervals are.
    """
    last = ends_last_epoch(cfg, epoch_itr, end_of_epoch)
    intervals = cfg.checkpoint.save_interval, cfg.dataset.validate_interval
    if last:
        cfg.checkpoint.save_interval = cfg.dataset.validate_interval = 1
    try:
        losses, should_stop = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
    except KeyError as error:
        if error.args != (cfg.checkpoint.best_checkpoint_metric,):
            raise
        # What has been trained until this first validation is not lost.
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        rule = "must be what a validation prints, such as loss or ppl"
        raise UsageError(f"--best-checkpoint-metric {rule}: got {error.args[0]}") from None
    finally:
        cfg.checkpoint.save_interval, cfg.dataset.validate_interval = intervals
    together = trainer.data_parallel_world_size > 1
    signum, due = (trainer.agreed, trainer.due) if together else (launch.signals.asked, is_due(trainer))
    if (signum is None and not due) or should_stop or last:
        return losses, should_stop
    if trainer.saved != trainer.get_num_updates():
        # Without the validation that fairseq's own ways to stop begin with: the uninterrupted run has none here.
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        # Where nothing may be saved, the clock begins anew all the same.
        trainer.saved_at = time.monotonic()
    if signum is not None and not end_of_epoch:
        trainer.leave(signum)
    # At the end of an epoch its statistics are still to be printed.
    trainer.leaving = signum
    return losses, should_stop


def finished(trainer: Any, filename: str, state: dict[str, Any], patience: Any) -> str | None:
    """The sentence for a checkpoint whose run has done all that it is asked for; None where there is more to train.

    fairseq would train one more update, and write that in the place of the checkpoint.

    Args:
        trainer: which has loaded the checkpoint.
        filename: the checkpoint.
        state: what it holds beside weights; empty where its epochs are not gone on with.
        patience: fairseq's function that counts for how long nothing has been better, if there is one.
    """
    cfg = trainer.cfg
    epochs = state["train_iterator"]["epoch"] - 1 if state else 0
    hours = state.get("previous_training_time", 0) / 3600
    limits = {
        "--max-update": (trainer.get_num_updates(), cfg.optimization.max_update),
        "--max-epoch": (epochs, cfg.optimization.max_epoch),
        "--patience": (getattr(patience, "num_runs", 0), cfg.checkpoint.patience),
        "--stop-time-hours": (hours, cfg.optimization.stop_time_hours),
    }
    for flag, (reached, limit) in limits.items():
        if (limit or 0) > 0 and reached >= limit:
            return (
                f"nothing to train: {filename} is of a finished run, with {flag} {limit} reached after "
                f"{trainer.get_num_updates()} updates; it stays as it is (a larger {flag} goes on)"
            )
    return None
