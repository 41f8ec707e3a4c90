"""The thread that reads batches ahead ends before its process does.

fairseq leaves it to the end of the interpreter, which may find it in the middle of an operation of torch: then C++ ends
the process by SIGABRT, and a training that has succeeded exits with 134.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fairseq.data.iterators import BackgroundConsumer

from fairseq_ms.host.wrapping import wrap

# A batch that takes longer than this, in seconds, is not waited for.
_PATIENCE = 30.0

_ending = threading.Event()
_running: weakref.WeakSet[BackgroundConsumer] = weakref.WeakSet()


def install() -> None:
    """Have every such thread end with its current batch when the process ends; calling it again does nothing."""
    wrap(BackgroundConsumer, "run", _until_the_end)
    atexit.unregister(_end)
    atexit.register(_end)


def _until_the_end(original: Callable[..., None], thread: Any) -> None:
    """``BackgroundConsumer.run``."""
    _running.add(thread)
    thread._source = _before_the_end(thread._source)
    original(thread)


def _before_the_end(source: Iterable[Any]) -> Iterator[Any]:
    for item in source:
        if _ending.is_set():
            return
        yield item


def _end() -> None:
    """Wait for the threads, and make room in the full queues at which they wait."""
    _ending.set()
    until = time.monotonic() + _PATIENCE
    for thread in list(_running):
        while thread.is_alive() and time.monotonic() < until:
            try:
                thread._queue.get_nowait()
            except queue.Empty:
                thread.join(0.01)
