"""Training that is asked to stop finishes its update, saves and ends, and the same command goes on bit-identically.

A scheduler asks by SIGTERM, or by SIGUSR1 when it warns ahead (Slurm's ``--signal=USR1@120``). What the ranks have
been asked travels with the statistics that they add up in every update, so that all of them stop after the same one
and none waits for another; nothing more is sent than before.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from torch import distributed

from fairseq_ms.host.quiet import logging_untouched
from fairseq_ms.host.wrapping import wrap

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# What --restore-file is unless it is given.
_LAST = "checkpoint_last.pt"


class _Request:
    """What this process has been asked, and what its ranks have agreed on.

    Attributes:
        own: the signal that has arrived here
        agreed: the one that some rank had received in the last update, on all ranks alike
        saved: the update after which a checkpoint was last written
        leaving: the signal by which this process ends, once everything is saved
        replaced: the signal handlers of before
    """

    def __init__(self) -> None:
        self.replaced: dict[int, Any] = {}
        self.forget()

    def forget(self) -> None:
        self.own: int | None = None
        self.agreed: int | None = None
        self.saved: int | None = None
        self.leaving: int | None = None

    def listen(self, handler: Callable[[int, Any], None]) -> None:
        """Handle the signals that nobody else handles or ignores."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if signal.getsignal(signum) is signal.SIG_DFL:
                self.replaced[signum] = signal.signal(signum, handler)

    def end(self) -> None:
        """Handle them as before."""
        for signum, handler in self.replaced.items():
            signal.signal(signum, handler)
        self.replaced = {}
        self.forget()


_request = _Request()


def install() -> None:
    """Have ``fairseq-train`` stop this way; calling it again does nothing."""
    with logging_untouched():
        import fairseq_cli.train
    # Run as `python -m fairseq_cli.train`, the program's own functions are these.
    for program in (fairseq_cli.train, sys.modules["__main__"]):
        if hasattr(program, "validate_and_save"):
            wrap(program, "train", _listening)
            wrap(program, "validate_and_save", _stopping)
    wrap(checkpoint_utils, "save_checkpoint", _noting_the_update)
    wrap(Trainer, "_aggregate_logging_outputs", _agreeing)
    wrap(EpochBatchIterator, "_get_iterator_for_epoch", _with_steady_workers)
    wrap(distributed_utils, "call_main", _until_it_ends)


def exit_code(signum: int) -> int:
    """128 + signal, as a shell says of a process that a signal has ended: 143 and 138. 0 is for finished training."""
    return 128 + signum


def _asked(signum: int, frame: Any) -> None:
    _request.own = signum


def _listening(original: Callable[..., Any], *args: Any) -> Any:
    """``train``, one epoch: from the first one on, signals are noted."""
    _request.listen(_asked)
    result = original(*args)
    if _request.leaving is not None:
        _leave(args[1], _request.leaving)
    return result


def _agreeing(
    original: Callable[..., Any], trainer: Any, logging_outputs: Any, *stats: Any, ignore: bool = False
) -> Any:
    """``Trainer._aggregate_logging_outputs``, which adds up statistics over the ranks."""
    own = [float(_request.own == signum) for signum in SIGNALS]
    outputs, sums = original(trainer, logging_outputs, *stats, *own, ignore=ignore)
    asked = [signum for signum, ranks in zip(SIGNALS, sums[len(stats) :]) if ranks > 0]
    _request.agreed = asked[0] if asked else None
    return outputs, sums[: len(stats)]


def _noting_the_update(original: Callable[..., Any], cfg: Any, trainer: Any, *args: Any, **more: Any) -> Any:
    """``save_checkpoint``."""
    saved = original(cfg, trainer, *args, **more)
    _request.saved = trainer.get_num_updates()
    return saved


def _stopping(
    original: Callable[..., Any], cfg: Any, trainer: Any, task: Any, epoch_itr: Any, subsets: Any, end_of_epoch: bool
) -> Any:
    """``validate_and_save``, which comes after every update."""
    losses, should_stop = original(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
    signum = _request.agreed if trainer.data_parallel_world_size > 1 else _request.own
    finished = should_stop or (end_of_epoch and epoch_itr.next_epoch_idx > (cfg.optimization.max_epoch or math.inf))
    if signum is None or finished:
        return losses, should_stop
    if _request.saved != trainer.get_num_updates():
        # Without the validation that fairseq's own ways to stop begin with: the uninterrupted run has none here.
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
    if not end_of_epoch:
        _leave(trainer, signum)
    # At the end of an epoch its statistics are still to be printed.
    _request.leaving = signum
    return losses, True


def _leave(trainer: Any, signum: int) -> None:
    """End this process, together with those of the other ranks."""
    if trainer.cfg.checkpoint.write_checkpoints_asynchronously:
        PathManager.async_close()
    if distributed.is_initialized():
        # A launcher ends all ranks when one has ended.
        distributed.barrier(distributed_utils.get_global_group())
    cfg = trainer.cfg.checkpoint
    without = " without saving, since --no-save is given" if cfg.no_save else ""
    onward = "the same command goes on from the last checkpoint"
    if cfg.restore_file != _LAST:
        onward = f"the same command begins with --restore-file {cfg.restore_file} again"
    elif cfg.no_last_checkpoints:
        onward = "the same command begins anew, since --no-last-checkpoints is given"
    logger.info(
        f"stopped by {signal.Signals(signum).name} after update {trainer.get_num_updates()}{without}; "
        f"{onward} (exit code {exit_code(signum)})"
    )
    raise SystemExit(exit_code(signum))


def _with_steady_workers(original: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """``EpochBatchIterator._get_iterator_for_epoch``, whose data workers stay when all processes of a job are asked."""
    make = torch.utils.data.DataLoader
    torch.utils.data.DataLoader = functools.partial(make, worker_init_fn=steady_worker)  # type: ignore
    try:
        return original(*args, **settings)
    finally:
        torch.utils.data.DataLoader = make


def steady_worker(number: int) -> None:
    """Have a data worker end by SIGTERM only if that comes from the process it works for."""
    if not hasattr(signal, "sigwaitinfo"):
        return
    parent = os.getppid()

    def wait() -> None:
        # A thread that waits for a signal can tell who has sent it, which a handler cannot.
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait, daemon=True).start()


def _until_it_ends(original: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """``call_main``, which starts the ranks of this machine where there are several GPUs, and waits for them."""
    spawn = torch.multiprocessing.spawn
    torch.multiprocessing.spawn = functools.partial(_handing_on, spawn)
    try:
        return original(*args, **settings)
    finally:
        torch.multiprocessing.spawn = spawn
        _request.end()


def _handing_on(spawn: Callable[..., Any], *args: Any, **settings: Any) -> None:
    """``torch.multiprocessing.spawn`` that hands signals on to the ranks, and ends as they do."""
    ranks = spawn(*args, **{**settings, "join": False})

    def hand_on(signum: int, frame: Any) -> None:
        _request.own = signum
        for process in ranks.processes:
            if process.is_alive():
                os.kill(process.pid, signum)

    _request.listen(hand_on)
    try:
        while not ranks.join():
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        # It is enough that one rank is asked, and one that does not train yet dies of the signal itself.
        for signum in SIGNALS:
            if error.exit_code == exit_code(signum) or (signum == _request.own and error.exit_code == -signum):
                raise SystemExit(exit_code(signum)) from None
        raise
