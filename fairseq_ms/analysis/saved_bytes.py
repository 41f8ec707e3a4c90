"""How much autograd keeps of a forward pass for the backward pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn


class _Saved:
    """What autograd holds in place of a saved tensor, so that its life is the saved tensor's."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(forward: Callable[[], object], *modules: nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass of what ``forward`` returns.

    Counted are the storages of all saved tensors that are alive when the forward pass is over, each once however
    many tensors share it and in full however little of it a tensor shows.

    Args:
        forward: computes what would be sent backward, and returns it or something that holds it.
        modules: their parameters do not count.
    """
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        # Detached, because the graph would otherwise hold itself.
        saved = _Saved(tensor.detach())
        alive.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor), torch.enable_grad():
        result = forward()
    gc.collect()
    parameters = {parameter.untyped_storage().data_ptr() for module in modules for parameter in module.parameters()}
    storages = [saved.tensor.untyped_storage() for saved in alive]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del result
    return sum(size for pointer, size in sizes.items() if pointer not in parameters)
