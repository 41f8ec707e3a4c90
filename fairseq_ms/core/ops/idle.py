"""Parameters that a batch leaves without work, which distributed training waits for all the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def keep_in_graph(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """x as it is, through which every one of the parameters gets a gradient of exactly zero.

    What is added is a sum over none of their numbers: zero times a sum over all of them would not be zero where that
    sum overflows, as it does in half precision.
    """
    nothing = [parameter.flatten()[:0] for parameter in parameters]
    return x + torch.cat(nothing).sum() if nothing else x
