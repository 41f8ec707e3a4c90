"""Fewer tensors for autograd to keep: recipes in place of tensors, seeds in place of dropout masks, and checkpoints.

Norms, activations and dropout take next to no time, but half of the memory that autograd would keep of a transformer
layer. The backward pass computes them again from inputs that are kept anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

# Private: the only way to ask whether saved-tensor hooks are allowed now, and which are active.
_autograd: Any = torch._C._autograd
_level: Any = torch._C._functorch.maybe_current_level
# Torch 2.6 cannot tell which are active: recipes inside a checkpoint keep their sources alive there.
_top_hooks: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def draw_seed() -> int:
    """A fresh seed from torch's default CPU generator, so that runs repeat under ``torch.manual_seed``."""
    return int(torch.randint(0, 2**62, (), device="cpu"))


def records() -> bool:
    """Whether autograd records operations now."""
    return torch.is_grad_enabled()


def ours() -> bool:
    """Whether masks and what is kept are ours to decide, with gradients or without: not compiled or in torch.func."""
    return hookable() and not torch.compiler.is_compiling()


def saves() -> bool:
    """Whether what autograd keeps is ours to decide now."""
    return records() and ours()


def hookable() -> bool:
    """Whether saved-tensor hooks are allowed, which ``torch.func`` refuses or does not know."""
    return torch.compiler.is_compiling() or (_autograd._saved_tensors_hooks_is_enabled() and _level() is None)


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, those of all modules included, or a ``forward`` of the instance's own."""
    m = torch_module
    everywhere = m._global_forward_hooks or m._global_forward_pre_hooks
    everywhere = everywhere or m._global_backward_hooks or m._global_backward_pre_hooks
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    # Libraries that place weights set a ``forward`` of the instance's own.
    return bool(everywhere or hooks) or "forward" in module.__dict__


def plain(module: nn.Module | None, *kinds: type[nn.Module]) -> bool:
    """Whether operations on a module's weights may replace a call of it or repeat one; True for None, a missing one.

    That is, whether it is exactly of one of these classes and has no hooks. Adapters, quantisation, pruning,
    ``torch.nn.utils.parametrize`` and ``fully_shard`` attach hooks or make subclasses.
    """
    return module is None or (type(module) in kinds and not hooked(module))


def refuse_second_derivatives(name: str) -> None:
    """Raise RuntimeError in a backward pass that autograd records; gradients by hand cannot be differentiated."""
    if saves():
        raise RuntimeError(f"{name} has no second derivative: go backward without create_graph=True")


def remade(
    made: Tensor, make: Callable[..., Tensor], *sources: Tensor, enabled: bool = True
) -> AbstractContextManager[object]:
    """In the block, autograd keeps the sources in place of ``made = make(*sources)``, which backward makes again.

    The block reads ``made``, as by the call of a module; whatever else it saves is kept. ``make`` must be
    deterministic, call no module that may have hooks, and read no tensors but the sources, which include parameters.
    Under autocast it must cast its result, since autocast would save another copy.
    """
    if not (enabled and saves()):
        return nullcontext()
    keep = _keeper()
    recipe = _Recipe(make, [keep(source) for source in sources], made.device)
    # ``made`` is known by its storage while it lives. Autograd keeps ``pack``, which must not hold a tensor.
    storage = StorageWeakRef(made.untyped_storage())

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        if StorageWeakRef(saved.untyped_storage()) != storage:
            return keep(saved)
        recipe.views += 1
        return partial(recipe.view, saved.shape, saved.stride(), saved.storage_offset())

    return saved_tensors_hooks(pack, lambda packed: packed())


def feed(
    read: Callable[[Tensor], Tensor], make: Callable[..., Tensor], *sources: Tensor, enabled: bool = True
) -> tuple[Tensor, Tensor]:
    """``read(made)`` and ``made = make(*sources)``, in the type of matrix products, ``remade`` for backward."""

    def cast(*sources: Tensor) -> Tensor:
        return autocasted(make(*sources))

    made = cast(*sources)
    with remade(made, cast, *sources, enabled=enabled):
        return read(made), made


def _keeper() -> Callable[[Tensor], Callable[[], Tensor]]:
    """How to keep a tensor: by the saved-tensor hooks around, such as a checkpoint's, or as it is."""
    if (around := _top_hooks(True)) is not None:
        pack, unpack = around
        return lambda saved: partial(unpack, pack(saved))

    def keep(saved: Tensor) -> Callable[[], Tensor]:
        # Detached, since the graph would otherwise hold itself by its results.
        return partial(_unchanged, saved.detach(), _version(saved))

    return keep


def _version(x: Tensor) -> int:
    """How often x has been changed in place, which tensors of inference mode do not count."""
    return 0 if x.is_inference() else x._version


def _unchanged(kept: Tensor, version: int) -> Tensor:
    """Raise RuntimeError, as autograd does, for a tensor that is not what it was in the forward pass."""
    if _version(kept) != version:
        change = f"a tensor {(*kept.shape,)} has been modified by an inplace operation"
        raise RuntimeError(f"{change} since the forward pass, and the backward pass needs it as it was")
    return kept


class _Recipe:
    """How to make a tensor again, once for all views of it that autograd has saved.

    Second derivatives are right, since autograd itself knows the views' place in the graph.
    """

    def __init__(self, make: Callable[..., Tensor], sources: Sequence[Callable[[], Tensor]], device: torch.device):
        self.make, self.sources = make, sources
        self.device, self.dtype = device, autocast_dtype(device)
        self.views = self.to_come = 0
        self.made: Tensor | None = None

    def view(self, *place: Any) -> Tensor:
        """The view with this shape, strides and offset."""
        made = self.made
        if made is None:
            with torch.no_grad(), autocast_to(self.device, self.dtype):
                made = self.make(*(source() for source in self.sources))
            self.to_come = self.views
        self.to_come -= 1
        self.made = made if self.to_come > 0 else None
        return made.as_strided(*place)


@cache
def _generator(device: torch.device, thread: int) -> torch.Generator:
    """A generator for each device and thread, since a new one for every mask would allocate its state."""
    return torch.Generator(device)


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless it is at least 0 and below 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1: got {value}")


def draw_mask(p: float, like: Tensor, seed: int | None = None) -> Tensor:
    """A dropout mask like ``like``, of a seed or of torch's generator: 0 with probability p, else 1 / (1 - p)."""
    mask, generator = torch.empty_like(like, memory_format=torch.contiguous_format), None
    if seed is not None and not like.is_meta:
        generator = _generator(like.device, threading.get_ident()).manual_seed(seed)
    if not like.is_cpu:
        return mask.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
    # On a CPU, ``bernoulli_`` draws otherwise on each maker's processors.
    uniform = torch.rand(like.shape, generator=generator, dtype=torch.float32, device="cpu")
    return torch.ge(uniform, p, out=mask).div_(1.0 - p)


def drop(x: Tensor, p: float, seed: int) -> Tensor:
    """Dropout of probability 0 <= p < 1 by the mask of a seed, which is not kept for backward."""
    if not p:
        return x
    shape, one = x.shape, partial(torch.empty, (), dtype=x.dtype, device=x.device)

    def make() -> Tensor:
        # For a tensor as large as x that has the memory of one number.
        return draw_mask(p, one().expand(shape), seed)

    mask = make()
    with remade(mask, make):
        return x * mask


class Dropout(nn.Module):
    """``nn.Dropout`` with probability p; with ``recompute``, backward draws the mask again."""

    def __init__(self, p: float, recompute: bool = True) -> None:
        super().__init__()
        self.p, self.recompute = p, recompute

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.recompute and self.p < 1.0 and ours():
            return drop(x, self.p, draw_seed())
        return F.dropout(x, self.p, training=True)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type of matrix products under autocast, or None where it is off or unknown (the meta device)."""
    # Not every compiler knows the first question.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device.type)
    if available and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def autocasted(x: Tensor) -> Tensor:
    """x in the type of ``autocast_dtype``, unless that is None or x is double."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """Autocast to a type, off for None; no context on a device without autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def checkpointed(
    layer: Callable[..., Tensor], *inputs: Any, enabled: bool = True, unhooked: Iterable[nn.Module | None] = ()
) -> Tensor:
    """``layer(*inputs)``; if ``enabled``, autograd keeps only the inputs, and the layer runs again in backward.

    It runs once if some of the modules that must be ``unhooked``, or some of their parts, have hooks.
    """
    parts = (part for module in unhooked if module is not None for part in module.modules())
    if enabled and records() and hookable() and not any(map(hooked, parts)):
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)


def keep_in_graph(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """x unchanged, through which all of the parameters get a gradient of exactly zero.

    By adding a sum over none of their numbers; zero times the sum over all would be NaN where that overflows.
    """
    nothing = [parameter.flatten()[:0] for parameter in parameters]
    return x + torch.cat(nothing).sum() if nothing else x
