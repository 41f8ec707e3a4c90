"""fairseq's commands in processes forked from one that has imported everything."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import fairseq_cli.train  # noqa: F401
import torch._dynamo  # noqa: F401  (every optimizer imports it, which takes longer than the rest of a tiny run)

# A server without threads forks them, so nothing of the tests' own process is inherited.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


# What is done to a rank before it trains, given its number.
Fault = Callable[[int], None]


def train(command: Sequence[object], log: Path, ranks: int = 1) -> None:
    """Run a command of fairseq's, which must end well, and write what rank 0 prints to ``log``."""
    codes = run(command, log, ranks)
    assert codes == [0] * ranks, (codes, log.read_text()[-3000:])


def run(command: Sequence[object], log: Path, ranks: int = 1, fault: Fault | None = None) -> list[int | None]:
    """Run a command of fairseq's as ``train`` does, and return the exit codes of all ranks.

    None stands for a rank that had not ended after five minutes, which is many times what a tiny run takes.
    """
    arguments = [str(part) for part in command]
    if ranks > 1:
        rendezvous = log.with_suffix(".rendezvous")
        arguments += ["--distributed-backend", "gloo", "--distributed-world-size", str(ranks), "--distributed-no-spawn"]
        arguments += ["--distributed-init-method", f"file://{rendezvous}"]
    processes = []
    for rank in range(ranks):
        own = [*arguments, "--distributed-rank", str(rank)] if ranks > 1 else arguments
        processes.append(context.Process(target=_work, args=(own, str(rank_log(log, rank)), rank, fault)))
    return ended(processes)


def ended(processes: Sequence[ForkServerProcess]) -> list[int | None]:
    """Start these processes and wait for them; their exit codes, None for one that takes longer than five minutes."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def print_to(log: str) -> None:
    """Send all that this process prints to a new file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)


def rank_log(log: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return log if rank == 0 else log.with_suffix(f".rank{rank}")


def curve(log: Path) -> dict[tuple[str, str], dict[str, str]]:
    """What was printed of every update and validation, without times."""
    records = {}
    for kind, printed in re.findall(r'\b(train|train_inner|valid)(?: \| |:)(\{"epoch".*\})', log.read_text()):
        record = json.loads(printed)
        step = record.get(f"{kind}_num_updates", record.get("num_updates"))
        times = ("wall", "wps", "ups", "wpb", "gb_free")
        records[kind, step] = {name: value for name, value in record.items() if not name.endswith(times)}
    return records


def _work(arguments: Sequence[str], log: str, rank: int, fault: Fault | None) -> None:
    print_to(log)
    # Data workers start as they do in a process of one's own.
    multiprocessing.set_start_method("fork", force=True)
    if fault is not None:
        fault(rank)
    sys.argv = list(arguments)
    module = arguments[0].removeprefix("fairseq-").replace("-", "_")
    try:
        importlib.import_module(f"fairseq_cli.{module}").cli_main()
    except (Exception, KeyboardInterrupt):
        # As at the end of a program; multiprocessing would print every traceback.
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
