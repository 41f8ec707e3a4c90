"""Operations that keep less for the backward pass than autograd would.

A transformer layer's cheap pointwise work (layer norm, activation, dropout) produces half of the
tensors that autograd keeps, and takes next to no time. Here its results are computed again in the
backward pass from inputs that are kept anyway, and a dropout mask is kept as the seed it was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Sixteen random bits decide over one number, so four are decided by one draw of the generator.
_LEVELS = 2**16
_64_BITS = 2**64 - 1


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


def draw_seed() -> int:
    """A fresh seed from torch's default CPU generator, so that runs repeat under ``torch.manual_seed``."""
    return int(torch.randint(0, 2**62, ()))


def mixed_seed(seed: int, *counters: int) -> int:
    """The seed of one of many masks, told apart by counters: 32 bits, in which every bit of all arguments counts.

    A generator on a CPU uses no more than 32 bits of its seed, and seeds that lie close together need not give
    streams that are far apart.
    """
    state = seed & _64_BITS
    for counter in (0, *counters):
        # One step of splitmix64, with the counter added to its state.
        state = (state + counter + 0x9E3779B97F4A7C15) & _64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _64_BITS
        state ^= state >> 31
    return state >> 32


def keep_prob(p: float) -> float:
    """The probability with which dropout of probability 0 < p < 1 keeps a number: 1 - p in steps of 2**-16."""
    return min(max(1, round((1.0 - p) * _LEVELS)), _LEVELS - 1) / _LEVELS


def keep_mask(seed: int, shape: torch.Size | tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """1 with probability ``keep_prob(p)``, else 0: the mask of a seed, of the type and on the device of ``like``."""
    mask = torch.empty(shape, dtype=like.dtype, device=like.device)
    if like.is_meta:
        return mask
    generator = torch.Generator(like.device)
    generator.manual_seed(seed)
    if like.device.type != "cpu":
        return mask.bernoulli_(keep_prob(p), generator=generator)
    # bernoulli_ takes 8 ns a number on a CPU, a sixteenth of a layer's time; this takes 1 ns.
    count = mask.numel()
    draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    lanes = draws.view(torch.int16)[:count].view(shape)
    return torch.lt(lanes, round(keep_prob(p) * _LEVELS) - _LEVELS // 2, out=mask)


def scaled_mask(seed: int, shape: torch.Size | tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """The dropout mask of a seed: 0 with probability p, else 1 / (1 - p)."""
    return keep_mask(seed, shape, p, like).mul_(1.0 / keep_prob(p))


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


class Dropout(nn.Module):
    """``dropout`` as a module, in the place of ``nn.Dropout``."""

    def __init__(self, p: float, recompute: bool = True) -> None:
        super().__init__()
        self.p = p
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training, self.recompute)


class ExplicitBackward(Protocol):
    """A function of tensors that ``pointwise_linear`` evaluates again in backward, with a backward of its own."""

    def __call__(self, *inputs: Tensor) -> Tensor: ...

    def backward(self, grad: Tensor, *inputs: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The function's result once more, and the gradients of the inputs given the gradient of the result.

        It may write into ``grad``, which nobody reads afterwards.
        """


class _PointwiseLinear(torch.autograd.Function):
    """``linear(function(*inputs))``, keeping the inputs and not what ``function`` made of them, which it may return."""

    @staticmethod
    def forward(ctx, function, and_hidden: bool, weight_OI: Tensor, bias_O: Tensor | None, *inputs: Tensor):  # type: ignore[no-untyped-def]
        ctx.function = function
        ctx.device_type = weight_OI.device.type
        ctx.autocast_dtype = autocast_dtype(ctx.device_type)
        ctx.has_bias = bias_O is not None
        ctx.save_for_backward(weight_OI, *inputs)
        hidden = function(*inputs)
        out = F.linear(hidden, weight_OI, bias_O)
        return (out, hidden) if and_hidden else out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_elsewhere: Tensor | None = None):  # type: ignore[no-untyped-def]
        weight_OI, *inputs = ctx.saved_tensors
        grad_hidden = grad @ weight_OI.to(grad.dtype)
        if grad_elsewhere is not None:
            grad_hidden = grad_hidden + grad_elsewhere
        with autocast_to(ctx.device_type, ctx.autocast_dtype):
            hidden, grad_inputs = _evaluate_again(ctx.function, grad_hidden, inputs)
        rows_grad = grad.reshape(-1, grad.size(-1))
        rows_hidden = hidden.reshape(-1, hidden.size(-1)).to(grad.dtype)
        grad_weight = rows_grad.t() @ rows_hidden
        grad_bias = rows_grad.sum(0) if ctx.has_bias else None
        return None, None, grad_weight, grad_bias, *grad_inputs


def _evaluate_again(
    function: Callable[..., Tensor], grad: Tensor, inputs: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    if hasattr(function, "backward"):
        return function.backward(grad, *inputs)
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        hidden = function(*inputs)
    return hidden.detach(), torch.autograd.grad(hidden, inputs, grad.to(hidden.dtype))


def pointwise_linear(
    function: Callable[..., Tensor] | ExplicitBackward, weight_OI: Tensor, bias_O: Tensor | None, *inputs: Tensor
) -> Tensor:
    """``F.linear(function(*inputs), weight, bias)``, evaluating ``function`` once more in backward.

    ``function`` must be a deterministic function of the inputs: what is random in it comes from a seed. Its
    gradients are autograd's, or its own where it is an ``ExplicitBackward``. All of the inputs must be floating point
    tensors (of any shape); the result has shape (..., O).
    """
    return _PointwiseLinear.apply(function, False, weight_OI, bias_O, *inputs)


def pointwise_linear_and_hidden(
    function: Callable[..., Tensor], weight_OI: Tensor, bias_O: Tensor | None, *inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """``pointwise_linear``, and ``function(*inputs)`` for others to use, who keep it if they need it in backward."""
    return _PointwiseLinear.apply(function, True, weight_OI, bias_O, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.function = function
        ctx.device_type = inputs[0].device.type
        ctx.autocast_dtype = autocast_dtype(ctx.device_type)
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        with autocast_to(ctx.device_type, ctx.autocast_dtype):
            # Autograd may need it for another tensor.
            grad = grad.clone() if hasattr(ctx.function, "backward") else grad
            return None, *_evaluate_again(ctx.function, grad, ctx.saved_tensors)[1]


def recomputed(function: Callable[..., Tensor] | ExplicitBackward, *inputs: Tensor, enabled: bool = True) -> Tensor:
    """``function(*inputs)``, keeping the inputs alone and evaluating it once more in backward, if enabled.

    ``function`` must be deterministic and use no tensor that needs a gradient but the inputs, which must all be
    floating point: parameters are inputs too. Its gradients are autograd's, or its own where it is an
    ``ExplicitBackward``.
    """
    if not (enabled and torch.is_grad_enabled()):
        return function(*inputs)
    return _Recomputed.apply(function, *inputs)


def checkpointed(layer: Callable[..., Tensor], *inputs: Any, enabled: bool) -> Tensor:
    """``layer(*inputs)``; if enabled, only the inputs are kept, and the layer runs again in backward."""
    if enabled and torch.is_grad_enabled():
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)
