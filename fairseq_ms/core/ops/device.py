"""What measuring and training ask of torch and of a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def wait_for(device: torch.device) -> None:
    """Return when a GPU has done what it was given; at once elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """``torch.cuda.max_memory_allocated`` while ``run()`` works on a GPU; None, without running it, elsewhere."""
    if device.type != "cuda":
        return None
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    wait_for(device)
    return int(torch.cuda.max_memory_allocated(device))


def autocast_of(tensor: Tensor, enabled: bool) -> AbstractContextManager:
    """torch's autocast for the device of a tensor."""
    return torch.autocast(tensor.device.type, enabled=enabled)


def wants_gradients() -> bool:
    """Whether what is computed now is to be trained on."""
    return torch.is_grad_enabled()
