"""Whether a module may be replaced by an operation on its weights, or computed a second time.

That would ignore or repeat whatever was attached to the module: an adapter or a quantised layer in its place, a
parametrization, pruning, a hook.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def hooked(module: nn.Module) -> bool:
    """Whether the module has hooks, or a ``forward`` of the instance's own; hooks of all modules count."""
    m = torch_module
    everywhere = m._global_forward_hooks or m._global_forward_pre_hooks
    everywhere = everywhere or m._global_backward_hooks or m._global_backward_pre_hooks
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    # Libraries that place weights set a ``forward`` of the instance's own.
    return bool(everywhere or hooks) or "forward" in vars(module)


def plain(module: nn.Module | None, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of exactly one of these kinds and has no hooks; None is a module that there is not.

    Exactly, since ``torch.nn.utils.parametrize`` and ``fully_shard`` make subclasses.
    """
    return module is None or (type(module) in kinds and not hooked(module))


def repeatable(*modules: nn.Module | None) -> bool:
    """Whether modules may be called a second time in backward: none has hooks, and no part of one."""
    return not any(hooked(part) for module in modules if module is not None for part in module.modules())


def table(words: nn.Module, symbols: int, device: torch.device | None = None) -> Tensor:
    """What an embedding gives for every symbol, (V, D): its weight, if it is plain."""
    if plain(words, nn.Embedding):
        return words.weight  # type: ignore[return-value]
    # An embedding gives its padding row no gradient; here it is a symbol like any other. Autograd notes the index now.
    parts = words.modules() if torch.is_grad_enabled() else ()
    padded: list[Any] = [module for module in parts if getattr(module, "padding_idx", None) is not None]
    indices = [module.padding_idx for module in padded]
    try:
        for module in padded:
            module.padding_idx = None
        # One row of tokens, since what stands in an embedding's place may want (B, T).
        return words(torch.arange(symbols, device=device or next(words.parameters()).device).unsqueeze(0)).squeeze(0)
    finally:
        for module, index in zip(padded, indices):
            module.padding_idx = index
