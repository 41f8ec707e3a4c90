"""The same function on many shards in worker processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Result = TypeVar("Result")


def leave_with(parent: int) -> None:
    """End this worker soon after its parent is gone, which cannot tell it when killed, and by Ctrl-C without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def each(function: Callable[..., Result], jobs: Iterable[tuple], workers: int) -> Iterator[Result]:
    """Yield `function(*job)` for every job as it finishes, in any order; one worker means this very process.

    ValueError when a worker dies, as it does when the machine runs out of memory.
    """
    if workers == 1:
        yield from (function(*job) for job in jobs)
        return
    with ProcessPoolExecutor(workers, initializer=leave_with, initargs=(os.getpid(),)) as pool:
        try:
            for finished in as_completed([pool.submit(function, *job) for job in jobs]):
                yield finished.result()
        except BrokenProcessPool:
            raise ValueError(
                f"a worker process died, probably for want of memory: run again with fewer --workers than "
                f"{workers}; finished shards are kept."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
