"""Results and gradients of two ways to compute the same."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gradients(outputs: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of the outputs, so that no element counts the same; zeros where there are none."""
    weights = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=torch.float64).view_as(outputs).to(outputs.dtype)
    return list(torch.autograd.grad((outputs * weights).sum(), list(inputs), materialize_grads=True))


def assert_same_with_gradients(one: Tensor, other: Tensor, inputs: Sequence[Tensor], tolerance: float = 1e-11) -> None:
    """The default is for the same operations in float64; sums over rows may be taken in another order."""
    for a, b in zip([one, *gradients(one, inputs)], [other, *gradients(other, inputs)], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
