"""What training and measuring ask of torch and of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def wait_for(device: torch.device) -> None:
    """Return when a GPU has done what it was given; at once elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def has_graphs(device: torch.device) -> bool:
    """Whether steps can be captured there and replayed, as CUDA graphs."""
    return device.type == "cuda"


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
    """Whether torch updates all of them in one kernel, ``fused=True``, where they are."""
    return all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
