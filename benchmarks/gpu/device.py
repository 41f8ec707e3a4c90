"""What measuring asks of a device: all calls of CUDA in this folder, and the same of a CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Protocol

import torch

from benchmarks.memory import highest_resident
from benchmarks.report import cpu_name
from fairseq_ms.core.ops.device import peak_bytes, wait_for
from fairseq_ms.errors import UsageError


class Device(Protocol):
    """Where a row is measured.

    Attributes:
        torch: for tensors and modules
        name: as its maker calls it
        memory: its bytes
    """

    torch: torch.device
    name: str
    memory: int

    def wait(self) -> None:
        """Return when everything is computed that was asked for."""

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes in use at the largest moment of ``run()``, weights and whatever else was there before included."""

    def release(self) -> None:
        """Give back the memory that nothing uses any more."""

    def ran_out(self, error: BaseException) -> bool:
        """Whether an error says that the memory does not suffice."""


class CudaDevice:
    """The GPU that torch chooses; memory is ``torch.cuda.max_memory_allocated``. UsageError where there is none."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UsageError(f"--device cuda needs a GPU: torch {torch.__version__} finds none")
        self.torch = torch.device("cuda")
        self.name = torch.cuda.get_device_name()
        self.memory = int(torch.cuda.get_device_properties(self.torch).total_memory)

    def wait(self) -> None:
        wait_for(self.torch)

    def peak(self, run: Callable[[], object]) -> int:
        peak = peak_bytes(self.torch, run)
        assert peak is not None
        return peak

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def ran_out(self, error: BaseException) -> bool:
        return isinstance(error, torch.cuda.OutOfMemoryError)


class CpuTwin:
    """A CPU with the same interface, to run through everything at tiny sizes; memory is the process's (Linux)."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.name = cpu_name()
        self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def wait(self) -> None:
        wait_for(self.torch)

    def peak(self, run: Callable[[], object]) -> int:
        return highest_resident(run)

    def release(self) -> None:
        gc.collect()

    def ran_out(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


DEVICES: dict[str, Callable[[], Device]] = {"cuda": CudaDevice, "cpu": CpuTwin}
