"""Results and gradients of two ways to compute the same."""

import torch


def gradients(outputs: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a weighted sum of the outputs, so that no element counts the same."""
    weights = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=torch.float64).view_as(outputs).to(outputs.dtype)
    return list(torch.autograd.grad((outputs * weights).sum(), inputs))


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        # The same operations in float64; sums over rows may be taken in another order.
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
