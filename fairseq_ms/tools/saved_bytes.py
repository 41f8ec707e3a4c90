"""How much autograd keeps of a forward pass for the backward pass."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class _Saved:
    """What autograd holds in place of a saved tensor, so that its life is the saved tensor's."""

    def __init__(self, tensor: Tensor, place: Hashable) -> None:
        self.tensor = tensor
        self.place = place


def saved_bytes(forward: Callable[[], object], *modules: nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass of what ``forward`` returns.

    Counted are the storages of all saved tensors that are alive when the forward pass is over, each once however
    many tensors share it and in full however little of it a tensor shows. The parameters of ``modules`` do not count.
    """
    return sum(saved_bytes_by_place(forward, lambda: None, *modules).values())


def saved_bytes_by_place(
    forward: Callable[[], object], place: Callable[[], Hashable], *modules: nn.Module
) -> dict[Hashable, int]:
    """``saved_bytes`` by what ``place()`` returned when a storage was first saved."""
    alive: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()

    def pack(tensor: Tensor) -> _Saved:
        # Detached, because the graph would otherwise hold itself.
        saved = _Saved(tensor.detach(), place())
        alive[id(saved)] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor), torch.enable_grad():
        result = forward()
    gc.collect()
    # Storages rather than addresses, which tensors without memory do not have.
    seen = {StorageWeakRef(parameter.untyped_storage()) for module in modules for parameter in module.parameters()}
    sizes: dict[Hashable, int] = defaultdict(int)
    for saved in alive.values():
        storage = saved.tensor.untyped_storage()
        if StorageWeakRef(storage) not in seen:
            seen.add(StorageWeakRef(storage))
            sizes[saved.place] += storage.nbytes()
    del result
    return dict(sizes)
