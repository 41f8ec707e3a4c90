"""How much a forward pass keeps for the backward pass: by the process's own account."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def resident_bytes() -> int:
    """The memory this process has in RAM (Linux)."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_growth(build: Callable[..., tuple[Callable[[], Tensor], Any]], *arguments: Any) -> int:
    """By how much a forward pass makes a fresh process larger, while its result is alive.

    ``build(*arguments)`` is called in the new process and returns the forward pass and whatever must live as
    long as it does. What autograd keeps is in this number wherever it hides, and so is what the allocator keeps.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_growth, args=(sender, build, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        raise RuntimeError("the process that measures resident memory ended early") from error
    finally:
        process.join()


def _measure_growth(sender: Any, build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    forward, keep_alive = build(*arguments)
    # Once with nothing kept, so that buffers of libraries and threads exist before the measurement.
    with torch.no_grad():
        forward()
    _give_back_free_memory()
    before = resident_bytes()
    result = forward()
    _give_back_free_memory()
    sender.send(resident_bytes() - before)
    del result, keep_alive


def _give_back_free_memory() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
