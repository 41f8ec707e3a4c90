"""Layer norm followed by a projection, with the normalised input computed again in backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.recompute import pointwise_linear, pointwise_linear_and_hidden


def norm_linear(x: Tensor, norm: nn.LayerNorm | None, linear: Linear, recompute: bool) -> Tensor:
    """``linear(norm(x))``; x (..., D) -> (..., O). Without a norm, ``linear(x)``."""
    if norm is None:
        return linear(x)
    if not (recompute and torch.is_grad_enabled()):
        return linear(norm(x))
    return pointwise_linear(_normalise(norm), linear.weight, linear.bias, x, norm.weight, norm.bias)


def norm_linear_and_normed(
    x: Tensor, norm: nn.LayerNorm | None, linear: Linear, recompute: bool
) -> tuple[Tensor, Tensor]:
    """``linear(norm(x))`` and ``norm(x)``, normalised once; the latter is kept for backward only by who uses it."""
    if norm is None:
        return linear(x), x
    if not (recompute and torch.is_grad_enabled()):
        normed = norm(x)
        return linear(normed), normed
    return pointwise_linear_and_hidden(_normalise(norm), linear.weight, linear.bias, x, norm.weight, norm.bias)


def _normalise(norm: nn.LayerNorm) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The layer norm as a function of its input and its parameters."""
    shape, eps = norm.normalized_shape, norm.eps

    def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    return normalise
