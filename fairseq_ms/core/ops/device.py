"""What training and measuring ask of torch and of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def wait_for(device: torch.device) -> None:
    """Wait until a GPU is done; returns at once elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def has_graphs(device: torch.device) -> bool:
    """Whether there are CUDA graphs."""
    return device.type == "cuda"


def gains_by_half(device: torch.device) -> bool:
    """Whether half precision is faster than single precision; on a CPU it is slower."""
    return device.type == "cuda"


def prefer_flash() -> None:
    """For the rest of the process, have attention on a GPU use flash kernels rather than cuDNN's.

    torch prefers cuDNN's on an H100 or H200, which take 0.4 s to plan for every new shape. This does not set an order
    by ``sdpa_kernel``, since torch sets its own with the first attention of a process.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """``torch.cuda.max_memory_allocated`` while ``run()`` works on a GPU; None, without running it, elsewhere."""
    if device.type != "cuda":
        return None
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    wait_for(device)
    return int(torch.cuda.max_memory_allocated(device))


def has_fused_optimizers(parameters: Iterable[Tensor]) -> bool:
    """Whether torch has fused optimizers, ``fused=True``, for the devices of these parameters."""
    return all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
