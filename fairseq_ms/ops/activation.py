"""Activation functions, each with a backward that writes into the gradient it is given where torch has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.recompute import draw_seed, pointwise_linear, scaled_mask

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


def _gelu_backward(approximate: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def backward(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=grad)

    return backward


def _relu_backward(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad)


# The gradient of the input, in the memory of the output's, given that, the input and the output. On a CPU, fresh memory
# for a tensor of this size takes longer than the arithmetic.
_IN_PLACE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu": _relu_backward,
    "gelu": _gelu_backward("none"),
    "gelu_accurate": _gelu_backward("tanh"),
}


class ActivationDropout:
    """An activation and dropout behind it, as an ``ExplicitBackward`` that overwrites the gradient it is given.

    Args:
        name: a key of ``ACTIVATIONS``
        dropout: probability of dropping an activation
    """

    def __init__(self, name: str, dropout: float) -> None:
        self.name = name
        self.dropout = dropout
        self.seed = draw_seed() if dropout > 0.0 else 0

    def __call__(self, x: Tensor) -> Tensor:
        y = ACTIVATIONS[self.name](x)
        # Not in place: "linear" gives x itself.
        return y * self._mask(y) if self.dropout > 0.0 else y

    def backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        grad = grad.to(x.dtype)
        if self.name not in _IN_PLACE:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                y = self(leaf)
            return y.detach(), torch.autograd.grad(y, leaf, grad)
        y = ACTIVATIONS[self.name](x)
        if self.dropout > 0.0:
            mask = self._mask(y)
            grad.mul_(mask)
            return mask.mul_(y), (_IN_PLACE[self.name](grad, x, y),)
        return y, (_IN_PLACE[self.name](grad, x, y),)

    def _mask(self, like: Tensor) -> Tensor:
        return scaled_mask(self.seed, like.shape, self.dropout, like)


def activation_linear(x: Tensor, name: str, dropout: float, linear: Linear, recompute: bool) -> Tensor:
    """``linear(F.dropout(ACTIVATIONS[name](x), dropout))``, its naive twin; x (..., I) -> (..., O).

    With ``recompute``, x is all that is kept: activation and dropout are computed again in backward.
    """
    if recompute and torch.is_grad_enabled():
        return pointwise_linear(ActivationDropout(name, dropout), linear.weight, linear.bias, x)
    return linear(F.dropout(ACTIVATIONS[name](x), dropout, training=True))
