"""Layer norm followed by a projection, with the normalised input computed again in backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.recompute import pointwise_linear


def norm_linear(x: Tensor, norm: nn.LayerNorm | None, linear: Linear, recompute: bool) -> Tensor:
    """``linear(norm(x))``; x (..., D) -> (..., O). Without a norm, ``linear(x)``."""
    if norm is None:
        return linear(x)
    if not (recompute and torch.is_grad_enabled()):
        return linear(norm(x))
    shape, eps = norm.normalized_shape, norm.eps

    def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    return pointwise_linear(normalise, linear.weight, linear.bias, x, norm.weight, norm.bias)
