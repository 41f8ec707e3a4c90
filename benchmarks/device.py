"""What measuring asks of a device: memory, time, and what it is called."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.table import Options, Work
from fairseq_ms.core.ops.device import peak_bytes, wait_for
from fairseq_ms.errors import UsageError


def facts(options: Options) -> dict[str, object]:
    """What the numbers depend on; UsageError where there is no GPU. Starts CUDA, so a process that forks must not."""
    if options.on_gpu and not torch.cuda.is_available():
        raise UsageError(f"--device cuda needs a GPU: torch {torch.__version__} finds none")
    prepare(options)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = torch.cuda.get_device_properties(0).total_memory if options.on_gpu else pages
    return {
        "device": torch.cuda.get_device_name() if options.on_gpu else cpu_name(),
        "memory_gb": round(memory / 1e9),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "quick": options.quick,
        **({} if options.on_gpu else {"cores": os.cpu_count(), "threads": torch.get_num_threads()}),
        **({} if options.clock == "wall" else {"clock": options.clock}),
    }


def cpu_name() -> str:
    """The processor, as its maker calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def prepare(options: Options) -> None:
    """Set the threads of a process that measures, and let it fail, not be killed, where memory ends."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if not options.on_gpu:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + free
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def seconds(work: Work, options: Options, repeats: int = 1) -> float:
    """How long ``work.run()`` takes, the mean of so many; what is to be done before each is not timed."""
    now = {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    device, total = torch.device(options.device), 0.0
    for count in [repeats] if work.before is None else [1] * repeats:
        if work.before is not None:
            work.before()
        wait_for(device)
        gc.collect()
        began = now()
        for _ in range(count):
            work.run()
        wait_for(device)
        total += now() - began
    return total / repeats


def peak(run: Callable[[], object], options: Options) -> int:
    """Bytes at the largest moment of ``run()``.

    On a GPU all that is in use, weights included; on a CPU by how much the process then is larger than before (Linux).
    """
    run()
    if options.on_gpu:
        found = peak_bytes(torch.device(options.device), run)
        assert found is not None
        return found
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Linux forgets the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    run()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024 - before


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the memory does not suffice."""
    said = str(error)
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "can't allocate memory" in said
