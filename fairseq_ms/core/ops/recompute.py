"""Operations that keep less for the backward pass than autograd would.

Dropout keeps the seed that its mask was drawn from; other work is computed again in the backward pass from inputs that
are kept anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# A mask takes 16 random bits a number, so one 64-bit draw of the generator serves four numbers.
_LEVELS = 2**16
_64_BITS = 2**64 - 1


def draw_seed() -> int:
    """A fresh seed from torch's default CPU generator, so that runs repeat under ``torch.manual_seed``."""
    return int(torch.randint(0, 2**62, (), device="cpu"))


def mixed_seed(seed: int, *counters: int) -> int:
    """A 32-bit seed for one of many masks, which counters tell apart; every bit of every argument matters.

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


def records() -> bool:
    """Whether autograd records what is computed now."""
    return torch.is_grad_enabled()


def saves() -> bool:
    """Whether operations with a gradient of their own are worth it: not in a compiled one, whose compiler decides.

    ``torch.compile`` computes again what is cheap, and would compile such an operation anew for every length.
    """
    return records() and not torch.compiler.is_compiling()


@cache
def _generator(device: torch.device, thread: int) -> torch.Generator:
    """One for each device and thread: a fresh one for every mask would allocate its state every time."""
    return torch.Generator(device)


def keep_prob(p: float) -> float:
    """The probability with which dropout of probability 0 < p < 1 keeps a number: 1 - p in steps of 2**-16."""
    return min(max(1, round((1.0 - p) * _LEVELS)), _LEVELS - 1) / _LEVELS


def keep_mask(seed: int, p: float, like: Tensor) -> Tensor:
    """1 with probability ``keep_prob(p)``, else 0: the mask of a seed, of the shape, type and device of ``like``."""
    mask = torch.empty_like(like, memory_format=torch.contiguous_format)
    if like.is_meta:
        return mask
    generator = _generator(like.device, threading.get_ident()).manual_seed(seed)
    if like.device.type != "cpu":
        return mask.bernoulli_(keep_prob(p), generator=generator)
    # bernoulli_ takes 8 ns a number on a CPU, a sixteenth of a layer's time; this takes 1 ns.
    count = mask.numel()
    draws = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None, generator=generator)
    lanes = draws.view(torch.int16)[:count].view(like.shape)
    return torch.lt(lanes, round(keep_prob(p) * _LEVELS) - _LEVELS // 2, out=mask)


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless it is at least 0 and below 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1: got {value}")


class DropoutMasks:
    """The masks of one dropout, drawn from one seed: the same ones in forward and backward.

    Args:
        p: probability of dropping, 0 < p < 1
    """

    def __init__(self, p: float) -> None:
        self.p = p
        self.seed = draw_seed()
        self.keep_prob = keep_prob(p)

    def scaled(self, like: Tensor) -> Tensor:
        """The mask of a whole tensor: 0 with probability p, else 1 / (1 - p)."""
        return keep_mask(self.seed, self.p, like).mul_(1.0 / self.keep_prob)

    def keep(self, like: Tensor, index: int) -> Tensor:
        """The mask of one piece of many, as ``keep_mask``: number ``index``."""
        return keep_mask(mixed_seed(self.seed, index), self.p, like)


def drop(x: Tensor, p: float) -> tuple[Tensor, DropoutMasks]:
    """x after dropout, as a new tensor, and the masks for its gradient."""
    masks = DropoutMasks(p)
    return x * masks.scaled(x), masks


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:
        y, ctx.masks = drop(x, p)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad * ctx.masks.scaled(grad), None


class Dropout(nn.Module):
    """``nn.Dropout`` with probability p, whose mask is drawn again in backward with ``recompute``, and not kept."""

    def __init__(self, p: float, recompute: bool = True) -> None:
        super().__init__()
        self.p = p
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.recompute and self.p < 1.0 and saves():
            return _SeededDropout.apply(x, self.p)
        return F.dropout(x, self.p, training=True)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type that autocast runs matrix products in now, or None where it is off or unknown (the meta device)."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """Autocast to a type, off for None, and nothing on a device that knows none."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.device = inputs[0].device
        ctx.autocast_dtype = autocast_dtype(ctx.device)
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        with autocast_to(ctx.device, ctx.autocast_dtype), torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            return None, *torch.autograd.grad(ctx.function(*inputs), inputs, grad)


def recomputed(function: Callable[..., Tensor], *inputs: Tensor, enabled: bool = True) -> Tensor:
    """``function(*inputs)``, keeping the inputs alone and evaluating it once more in backward, if enabled.

    ``function`` must be deterministic and use no tensor that needs a gradient but the inputs, which must all be
    floating point: parameters are inputs too.
    """
    if not (enabled and saves()):
        return function(*inputs)
    return _Recomputed.apply(function, *inputs)


def checkpointed(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """``layer(*inputs)``; only the inputs are kept, and the layer runs again in backward."""
    if torch.is_grad_enabled():
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)


def keep_in_graph(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """x unchanged, but every one of the parameters gets a gradient of exactly zero through it.

    What is added is a sum over none of their numbers: zero times a sum over all of them would not be zero where that
    sum overflows, as it does in half precision.
    """
    nothing = [parameter.flatten()[:0] for parameter in parameters]
    return x + torch.cat(nothing).sum() if nothing else x
