"""Whether operations on a module's weights may replace a call of it, and whether it may be called a second time.

That would ignore, or repeat, what was attached to the module: adapters, quantisation, parametrizations, pruning, hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, those of all modules included, or a ``forward`` of the instance's own."""
    m = torch_module
    everywhere = m._global_forward_hooks or m._global_forward_pre_hooks
    everywhere = everywhere or m._global_backward_hooks or m._global_backward_pre_hooks
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    # Libraries that place weights set a ``forward`` of the instance's own.
    return bool(everywhere or hooks) or "forward" in module.__dict__


def plain(module: nn.Module | None, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these classes and has no hooks; True for None, a missing module.

    Exactly, since ``torch.nn.utils.parametrize`` and ``fully_shard`` make subclasses.
    """
    return module is None or (type(module) in kinds and not hooked(module))


def parts_of(modules: Iterable[nn.Module | None]) -> Iterator[nn.Module]:
    """The modules and all their submodules; None is a missing module."""
    return (part for module in modules if module is not None for part in module.modules())


def table(words: nn.Module, symbols: int, device: torch.device | None = None) -> Tensor:
    """The embeddings of all symbols, (V, D): the weight of an embedding, if it is plain."""
    if plain(words, nn.Embedding):
        return words.weight  # type: ignore[return-value]
    # Embeddings give their padding row no gradient, but here it is a symbol like any other.
    parts = words.modules() if torch.is_grad_enabled() else ()
    padded: list[Any] = [module for module in parts if getattr(module, "padding_idx", None) is not None]
    indices = [module.padding_idx for module in padded]
    try:
        for module in padded:
            module.padding_idx = None
        # As (B, T), which a module in the place of an embedding may want.
        return words(torch.arange(symbols, device=device or next(words.parameters()).device).unsqueeze(0)).squeeze(0)
    finally:
        for module, index in zip(padded, indices):
            module.padding_idx = index
