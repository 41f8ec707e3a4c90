"""fairseq's commands: which processes run, how what is refused reads, and who hears of signals.

fairseq takes the number of processes from its command line, where the default is the number of GPUs that it sees: on
CPUs, and nodes with one GPU, every process of a launcher would train alone, and write the same checkpoints.
"""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, NoReturn

import torch
from fairseq.distributed import utils as distributed_utils
from torch import nn
from torch.multiprocessing import ProcessExitedException

from fairseq_ms.errors import UsageError, parser_sentence, sentence_of
from fairseq_ms.host import rules
from fairseq_ms.tools.lock import FolderLock

logger = logging.getLogger(__name__)

# A scheduler asks a run to stop by SIGTERM, or by SIGUSR1 when it warns ahead (Slurm's ``--signal=USR1@120``), and
# Ctrl-C by SIGINT.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A second SIGINT ends at once, unless it comes so soon, in seconds: a launcher hands on what the terminal has sent to
# all processes.
_ECHO = 1.0
# Of the exit code by which a shell says that a signal has ended a process: 143, 138, 130. 0 is for finished training.
SIGNALLED = 128
_LEFTOVER = re.compile(r"checkpoint.*\.pt\.tmp")


def parse_plainly(original: Callable[..., Any], parser: ArgumentParser, *args: Any, **settings: Any) -> Any:
    """``parse_args_and_arch``: a mistake is one sentence instead of pages of usage, and ``--bf16`` means no TPU.

    fairseq takes ``--bf16`` for a TPU's alone; ``--tpu`` is no flag here. ``--required-batch-size-multiple`` is 1
    unless it is given, since fairseq's 8 leaves out the last rows.
    """
    given = settings.pop("input_args", args[0] if args else None)
    args = (one_word_at_most(sys.argv[1:] if given is None else given), *args[1:])

    def refuse(message: str) -> NoReturn:
        parser.exit(2, f"{parser.prog}: error: {parser_sentence(message, parser)}\n")

    parser.error = refuse  # type: ignore[method-assign]
    if "--tpu" in parser._option_string_actions:
        parser._handle_conflict_resolve(None, [("--tpu", parser._option_string_actions["--tpu"])])  # type: ignore
    if "--required-batch-size-multiple" in parser._option_string_actions:
        parser.set_defaults(required_batch_size_multiple=1)
    try:
        found = original(parser, *args, **settings)
    except (RuntimeError, KeyError) as error:
        # fairseq looks up what has not been given.
        if error.args not in ((), (None,)):
            raise
        refuse(f"--{'arch' if isinstance(error, RuntimeError) else 'task'} must be given")
    (found[0] if isinstance(found, tuple) else found).tpu = False
    return found


def one_word_at_most(arguments: Iterable[str]) -> list[str]:
    """Arguments whose ``--qk-norm`` has a word that it knows or none; argparse takes a data folder for its word."""
    found, words = list[str](), ("scaled", "True", "False")
    for argument in arguments:
        if found and found[-1] == "--qk-norm":
            found[-1:] = [f"--qk-norm={argument}"] if argument in words else ["--qk-norm=True", argument]
        else:
            found.append(argument)
    return found


def run_together(original: Callable[..., Any], cfg: Any, main: Callable[..., Any], **settings: Any) -> None:
    """``call_main``: runs ``main`` in this process, in those of a launcher, or in one for each GPU here.

    Raises UsageError for what is refused, and SystemExit where a signal has ended processes that were started here.
    """
    rules.refuse(cfg)
    training = cfg.distributed_training
    launched = rules.launched() > 1 and not training.pipeline_model_parallel
    if training.distributed_init_method is None and launched:
        _join(training)
    elif training.distributed_init_method is None:
        _meet(training)
    main = functools.partial(_run, main)
    try:
        if training.distributed_init_method is None or training.distributed_no_spawn:
            original(cfg, main, **settings)
        else:
            _start(main, cfg, settings)
    finally:
        signals.end()


def _meet(training: Any) -> None:
    """Say where processes meet that Slurm has started, or that this one starts, one for each GPU here.

    Raises UsageError where there are fewer GPUs. fairseq looks for none if ``--distributed-port`` is given, and then
    trains alone.
    """
    size, gpus = training.distributed_world_size, torch.cuda.device_count()
    slurm = any(name in os.environ for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    if size > max(1, gpus) and not slurm:
        raise UsageError(
            f"--distributed-world-size must be at most the {gpus} GPUs here where no launcher starts the processes, as "
            f"torchrun --nproc-per-node {size} does: got {size}"
        )
    distributed_utils.infer_init_method(training, force_distributed=True)


def _join(training: Any) -> None:
    """Take world size, rank and rendezvous from the launcher's environment variables."""
    training.distributed_init_method = "env://"
    training.distributed_world_size = int(os.environ["WORLD_SIZE"])
    training.distributed_rank = int(os.environ["RANK"])
    # Of the node's GPUs; nodes need not have as many of them.
    local = int(os.environ.get("LOCAL_RANK", training.distributed_rank))
    training.device_id = local % max(1, torch.cuda.device_count())
    training.distributed_no_spawn = True


def _start(main: Callable[..., Any], cfg: Any, settings: dict[str, Any]) -> None:
    """Start a process for each GPU, hand signals on to them, and end as they do."""
    training = cfg.distributed_training
    settings["start_rank"], training.distributed_rank = training.distributed_rank, None
    count = min(torch.cuda.device_count(), training.distributed_world_size)
    if not count:
        raise UsageError(
            "--distributed-no-spawn must be given with --distributed-init-method on a machine without a GPU, since "
            "fairseq starts a process for each GPU"
        )
    ranks = torch.multiprocessing.spawn(
        distributed_utils.distributed_main, (main, cfg, settings), nprocs=count, join=False
    )

    def hand_on(signum: int) -> None:
        for process in ranks.processes:
            if process.is_alive():
                os.kill(process.pid, signum)

    signals.listen(hand_on)
    try:
        while not ranks.join():
            pass
    except ProcessExitedException as error:
        end_as(error)


def end_as(error: ProcessExitedException) -> None:
    """Exit with 128 + signal if a signal has stopped a child process; raise UsageError if the child has failed."""
    for signum in SIGNALS:
        # It is enough that one rank is asked, and one that does not train yet dies of the signal itself.
        if error.exit_code == SIGNALLED + signum or (signum == signals.asked and error.exit_code == -signum):
            raise SystemExit(SIGNALLED + signum) from None
    raise UsageError(
        f"process {error.error_index} of this run has ended with exit code {error.exit_code}, which is -9 where memory "
        "has run out; the same command goes on from the last checkpoint"
    ) from None


def on_its_own_device(
    original: Callable[..., Any],
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    *args: Any,
    **settings: Any,
) -> Any:
    """``DistributedDataParallel``, to which fairseq names a GPU for every process, also where the model is on a CPU."""
    if all(weight.device.type == "cpu" for weight in module.parameters()):
        device_ids = output_device = None
    return original(module, device_ids, output_device, *args, **settings)


class Finished(Exception):
    """There is nothing to train; the command ends well, having changed nothing."""


class Signals:
    """Signals that ask to stop: ``asked`` is the one received, or None; ``replaced`` are the handlers of before."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.asked_at = math.inf
        self.replaced: dict[int, Any] = {}

    def listen(self, hand_on: Callable[[int], None] | None = None) -> None:
        """Note signals that have no other handler and are not ignored, and pass them to ``hand_on``."""
        if threading.current_thread() is not threading.main_thread():
            return

        def note(signum: int, frame: Any) -> None:
            if signum == self.asked == signal.SIGINT and time.monotonic() - self.asked_at > _ECHO:
                if hand_on is not None:
                    hand_on(signum)
                raise KeyboardInterrupt
            if signum != self.asked:
                self.asked, self.asked_at = signum, time.monotonic()
            if hand_on is not None:
                hand_on(signum)

        for signum in SIGNALS:
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                self.replaced[signum] = signal.signal(signum, note)

    def end(self) -> None:
        """Restore the handlers of before; a process that was asked to end dies of Ctrl-C without a traceback."""
        for signum, handler in self.replaced.items():
            interrupts = handler is signal.default_int_handler and self.asked is not None
            signal.signal(signum, signal.SIG_DFL if interrupts else handler)
        self.asked, self.replaced = None, {}


signals = Signals()


class HeldLog:
    """Holds back log records until there is a trainer, and drops them if the training is refused before."""

    def __init__(self) -> None:
        self.kept = MemoryHandler(0)
        self.others: list[logging.Handler] | None = None
        self.can_end = False
        self.saves = True

    def hold(self) -> None:
        """Replace the root logger's handlers, unless that is done already or no call would restore them."""
        if self.can_end and self.others is None:
            # Who configures logging, as fairseq-hydra-train does, closes all handlers that there are.
            self.kept = MemoryHandler(sys.maxsize, logging.CRITICAL + 1, target=logging.root)  # type: ignore[arg-type]
            self.others, logging.root.handlers = logging.root.handlers, [self.kept]

    def show(self) -> None:
        """Restore the handlers and emit what was held back."""
        if self.others is not None:
            logging.root.handlers, self.others = self.others, None
        self.kept.flush()


held_log = HeldLog()
save_lock = FolderLock()


def _screen(cfg: Any) -> AbstractContextManager[None]:
    """What shows a run whose configuration asks for it, in each of its processes."""
    if not rules.setting(cfg, "screen", False):
        return nullcontext()
    from fairseq_ms.host import screen  # which imports fairseq's program

    return screen.shown()


def _run(main: Callable[..., Any], cfg: Any, **settings: Any) -> Any:
    """Run ``main`` and show its log, unless it was refused before there was a trainer."""
    held_log.can_end, held_log.saves = True, not rules.setting(cfg, "checkpoint.no_save", False)
    if multiprocessing.parent_process() is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # torch takes a process that it has started and that Ctrl-C ends for one that has ended well.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with _screen(cfg):
            return main(cfg, **settings)
    except Finished as finished:
        held_log.show()
        logger.info(finished)
        return None
    except RuntimeError as error:
        # Who stops a whole group of processes, as timeout does, stops those that read data before this one can save.
        if signals.asked is None or "DataLoader worker" not in str(error):
            raise
        name = signal.Signals(signals.asked).name
        logger.info(
            f"stopped by {name}, as were the processes that read data; the same command goes on from the last "
            "checkpoint"
        )
        raise SystemExit(SIGNALLED + signals.asked) from None
    except Exception as error:
        if sentence_of(error) is not None:
            held_log.kept.buffer.clear()
        raise
    finally:
        held_log.can_end, held_log.saves = False, True
        save_lock.release()
        held_log.show()


def try_without_trace(original: Callable[..., None], save_dir: str) -> None:
    """``verify_checkpoint_directory``, the last thing before a training prints its configuration.

    The folder is this run's alone until the run ends, and is then removed if nothing has been saved. What a killed run
    left half written is removed.
    """
    if held_log.saves:
        try:
            save_lock.take(Path(save_dir), "--save-dir")
            original(save_dir)
            for path in Path(save_dir).iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    path.unlink()
        except OSError as error:
            save_lock.release()
            raise UsageError(
                f"--save-dir must be a folder in which files can be made: got {save_dir} ({error.strerror})"
            ) from error
    if not held_log.can_end:
        save_lock.release()
    held_log.hold()
