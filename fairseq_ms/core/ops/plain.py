"""Whether the weights of a module may be read in place of calling it.

Fused operations do that, and would pass over whatever wraps a projection: an adapter or a quantised layer in its place,
a parametrization, pruning, a hook.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

M = TypeVar("M", bound=type[nn.Module])

# Exact types: ``torch.nn.utils.parametrize`` and ``fully_shard`` make subclasses of them.
_OURS: set[type[nn.Module]] = {nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.LSTM}


def ours(kind: M) -> M:
    """A class whose parts an operation may use without calling it."""
    _OURS.add(kind)
    return kind


def is_ours(module: nn.Module) -> bool:
    """Whether the module is of exactly such a class."""
    return type(module) in _OURS


def hooked(module: nn.Module) -> bool:
    """Whether anything is to happen when the module is called, or when its gradient is."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    # Libraries that place weights set a ``forward`` of the instance's own.
    return bool(hooks) or "forward" in vars(module)


def all_hooked() -> bool:
    """Whether anything is to happen when any module is called."""
    m = torch_module
    everywhere = m._global_forward_hooks or m._global_forward_pre_hooks
    return bool(everywhere or m._global_backward_hooks or m._global_backward_pre_hooks)


def plain(*modules: nn.Module | None) -> bool:
    """Whether all modules are exactly what they were built as, and nothing happens when they are called.

    If not, whoever asks calls them; None is a module that there is not.
    """
    for module in modules:
        if module is not None and (type(module) not in _OURS or hooked(module)):
            return False
    return not all_hooked()


def table(words: nn.Module, symbols: int, device: torch.device | None = None, despite_hooks: bool = False) -> Tensor:
    """What an embedding gives for every symbol, (V, D): its weight, if it is plain.

    ``despite_hooks`` are those of the tokens that a model reads, which a matrix for other ends has nothing to do with.
    """
    if plain(words) or (despite_hooks and type(words) is nn.Embedding and "forward" not in vars(words)):
        return words.weight  # type: ignore[return-value]
    # One row of tokens, since what stands in an embedding's place may want (B, T).
    return words(torch.arange(symbols, device=device or next(words.parameters()).device).unsqueeze(0)).squeeze(0)
