"""How much a training step takes, and its forward pass keeps: by the account of a process of its own.

`python -m benchmarks.memory` is that process; it runs in the checkout, where this package is importable.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]


def resident_bytes() -> int:
    """The memory this process has in RAM (Linux)."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def highest_resident(run: Callable[[], object]) -> int:
    """The memory this process has in RAM at the largest moment of ``run()`` (Linux)."""
    # Linux forgets the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    run()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def resident_growth(build: Callable[..., tuple[Callable[[], Tensor], object]], *arguments: object) -> int:
    """By how much a forward pass makes a fresh process larger, while its result is alive.

    ``build(*arguments)`` is called in the new process and returns the forward pass and whatever must live as
    long as it does. What autograd keeps is in this number wherever it hides, and so is what the allocator keeps.
    """
    return _in_a_fresh_process(growth_here, build, arguments)


def resident_peak(build: Callable[..., tuple[Callable[[], Tensor], object]], *arguments: object) -> int:
    """By how much a fresh process is larger than before at the largest moment of a forward and backward pass.

    The gradients of all parameters are made on the way, and in the number.
    """
    return _in_a_fresh_process(peak_here, build, arguments)


def _in_a_fresh_process(measure: Callable[..., int], build: Callable[..., object], arguments: tuple) -> int:
    program = [sys.executable, "-m", "benchmarks.memory"]
    wanted = pickle.dumps((measure.__name__, build, arguments))
    done = subprocess.run(program, cwd=ROOT, input=wanted, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise RuntimeError("the process that measures resident memory ended early")
    return int(done.stdout.split()[-1])


def growth_here(build: Callable[..., tuple[Callable[[], Tensor], object]], *arguments: object) -> int:
    """The same in this process, which should be fresh."""
    forward, keep_alive = build(*arguments)
    # Once with nothing kept, so that buffers of libraries and threads exist before the measurement.
    with torch.no_grad():
        forward()
    _give_back_free_memory()
    before = resident_bytes()
    result = forward()
    _give_back_free_memory()
    growth = resident_bytes() - before
    del result, keep_alive
    return growth


def peak_here(build: Callable[..., tuple[Callable[[], Tensor], object]], *arguments: object) -> int:
    """The same for ``resident_peak``."""
    forward, keep_alive = build(*arguments)
    with torch.no_grad():
        forward()
    _give_back_free_memory()
    before = resident_bytes()
    peak = highest_resident(lambda: forward().backward())
    del keep_alive
    return peak - before


def _give_back_free_memory() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


if __name__ == "__main__":
    measure, wanted, given = pickle.load(sys.stdin.buffer)
    print({"growth_here": growth_here, "peak_here": peak_here}[measure](wanted, *given))
