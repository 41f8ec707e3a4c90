"""What training and measuring ask of torch and of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

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


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast runs matrix products in now, or None where it is off or unknown (the meta device)."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def autocast_to(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager:
    """Autocast to a type, off for None, and nothing on a device that knows none."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


def autocast_of(tensor: Tensor, enabled: bool) -> AbstractContextManager:
    """torch's autocast for the device of a tensor."""
    return torch.autocast(tensor.device.type, enabled=enabled)


def has_fused_optimizers(parameters: Iterable[Tensor]) -> bool:
    """Whether torch updates all of them in one kernel, ``fused=True``, where they are."""
    return all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)


def wants_gradients() -> bool:
    """Whether what is computed now is to be trained on."""
    return torch.is_grad_enabled()


def keep_in_graph(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """x as it is, through which every one of the parameters gets a gradient of exactly zero.

    What is added is a sum over none of their numbers: zero times a sum over all of them would not be zero where that
    sum overflows, as it does in half precision.
    """
    nothing = [parameter.flatten()[:0] for parameter in parameters]
    return x + torch.cat(nothing).sum() if nothing else x
