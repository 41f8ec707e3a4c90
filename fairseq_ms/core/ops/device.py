"""What the core asks of a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def has_graphs(device: torch.device) -> bool:
    """Whether there are CUDA graphs."""
    return device.type == "cuda"


def has_fused_optimizers(parameters: Iterable[Tensor]) -> bool:
    """Whether torch has fused optimizers, ``fused=True``, for the devices of these parameters."""
    return all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
