"""How much autograd keeps of a forward pass for the backward pass."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_ms.modules.layer import TransformerStack


class _Saved:
    """What autograd holds in place of a saved tensor, so that its life is the saved tensor's."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(forward: Callable[[], Any], *modules: nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass of what ``forward`` returns.

    Counted are the storages of all saved tensors that are alive when the forward pass is over, each once however
    many tensors share it and in full however little of it a tensor shows. Under ``--checkpoint-activations``, the
    inputs of the layers count, which are kept out of autograd's sight.

    Args:
        forward: computes what would be sent backward, and returns it or something that holds it.
        modules: their parameters do not count.
    """
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
    inputs: list[Tensor] = []

    def pack(tensor: Tensor) -> _Saved:
        # Detached, because the graph would otherwise hold itself.
        saved = _Saved(tensor.detach())
        alive.add(saved)
        return saved

    def keep_input(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs.append(arguments[0].detach())

    with contextlib.ExitStack() as hooks:
        for part in (part for module in modules for part in module.modules()):
            if isinstance(part, TransformerStack) and part.checkpoint:
                for layer in part.layers:
                    hooks.callback(layer.register_forward_pre_hook(keep_input).remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor))
        hooks.enter_context(torch.enable_grad())
        result = forward()
    gc.collect()
    parameters = {parameter.untyped_storage().data_ptr() for module in modules for parameter in module.parameters()}
    storages = [tensor.untyped_storage() for tensor in (*(saved.tensor for saved in alive), *inputs)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del result
    return sum(size for pointer, size in sizes.items() if pointer not in parameters)
