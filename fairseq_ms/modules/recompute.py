"""Operations that keep less for the backward pass than autograd would.

A transformer layer's cheap pointwise work (layer norm, activation, dropout) produces half of the
tensors that autograd keeps, and takes next to no time. Here its results are computed again in the
backward pass from inputs that are kept anyway, and a dropout mask is kept as the seed it was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def draw_seed() -> int:
    """A fresh seed from torch's default CPU generator, so that runs repeat under ``torch.manual_seed``."""
    return int(torch.randint(0, 2**62, ()))


def scaled_mask(seed: int, shape: torch.Size | tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """The dropout mask of a seed: 0 with probability p, else 1 / (1 - p), on the device of ``like``."""
    generator = torch.Generator(like.device)
    generator.manual_seed(seed)
    mask = torch.empty(shape, dtype=like.dtype, device=like.device)
    return mask.bernoulli_(1.0 - p, generator=generator).mul_(1.0 / (1.0 - p))


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.p, ctx.seed = p, seed
        return x * scaled_mask(seed, x.shape, p, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return grad * scaled_mask(ctx.seed, grad.shape, ctx.p, grad), None, None


def dropout(x: Tensor, p: float, training: bool, recompute: bool = True) -> Tensor:
    """Dropout with probability p; with ``recompute`` its mask is drawn again in backward, not kept."""
    if not training or p == 0.0:
        return x
    if recompute and p < 1.0:
        return _SeededDropout.apply(x, p, draw_seed())
    return F.dropout(x, p, training=True)


class _PointwiseLinear(torch.autograd.Function):
    """``linear(pointwise(*inputs))``, keeping the inputs and not what ``pointwise`` made of them."""

    @staticmethod
    def forward(ctx, pointwise, weight_OI: Tensor, bias_O: Tensor | None, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.pointwise = pointwise
        ctx.device_type = weight_OI.device.type
        ctx.autocast_dtype = (
            torch.get_autocast_dtype(ctx.device_type) if torch.is_autocast_enabled(ctx.device_type) else None
        )
        ctx.has_bias = bias_O is not None
        ctx.save_for_backward(weight_OI, *inputs)
        return F.linear(pointwise(*inputs), weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        weight_OI, *saved = ctx.saved_tensors
        autocast = torch.autocast(ctx.device_type, dtype=ctx.autocast_dtype, enabled=ctx.autocast_dtype is not None)
        with torch.enable_grad(), autocast:
            inputs = [tensor.detach().requires_grad_() for tensor in saved]
            hidden = ctx.pointwise(*inputs)
        grad_hidden = (grad @ weight_OI.to(grad.dtype)).to(hidden.dtype)
        grad_inputs = torch.autograd.grad(hidden, inputs, grad_hidden)
        rows_grad = grad.reshape(-1, grad.size(-1))
        rows_hidden = hidden.detach().reshape(-1, hidden.size(-1)).to(grad.dtype)
        grad_weight = rows_grad.t() @ rows_hidden
        grad_bias = rows_grad.sum(0) if ctx.has_bias else None
        return None, grad_weight, grad_bias, *grad_inputs


def pointwise_linear(
    pointwise: Callable[..., Tensor], weight_OI: Tensor, bias_O: Tensor | None, *inputs: Tensor
) -> Tensor:
    """``F.linear(pointwise(*inputs), weight, bias)``, evaluating ``pointwise`` once more in backward.

    ``pointwise`` must be a deterministic function of the inputs: what is random in it comes from a seed.
    All of the inputs must be floating point tensors (of any shape); the result has shape (..., O).
    """
    return _PointwiseLinear.apply(pointwise, weight_OI, bias_O, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.function = function
        ctx.device_type = inputs[0].device.type
        ctx.autocast_dtype = (
            torch.get_autocast_dtype(ctx.device_type) if torch.is_autocast_enabled(ctx.device_type) else None
        )
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        autocast = torch.autocast(ctx.device_type, dtype=ctx.autocast_dtype, enabled=ctx.autocast_dtype is not None)
        with torch.enable_grad(), autocast:
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, grad)


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, keeping the inputs alone and evaluating it once more in backward.

    ``function`` must be deterministic and use no tensor that needs a gradient but the inputs, which must all be
    floating point: parameters are inputs too.
    """
    return _Recomputed.apply(function, *inputs)
