"""The losses that the benchmarks of training compare, as functions of a model and a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from benchmarks.peers import Sample, language_model_loss
from fairseq_ms.criterions.linear_cross_entropy import LinearCrossEntropyCriterion

Loss = Callable[[nn.Module, Sample], Tensor]


def linear_cross_entropy_loss(model: Any, sample: Sample) -> Tensor:
    """As ``language_model_loss``, computed as our ``linear_cross_entropy`` does."""
    task = SimpleNamespace(target_dictionary=model.decoder.dictionary)
    return LinearCrossEntropyCriterion(task, sentence_avg=False, label_smoothing=0.0)(model, {**sample})[0]


LOSSES: dict[str, Loss] = {
    "cross_entropy": language_model_loss,
    "linear_cross_entropy": linear_cross_entropy_loss,
}


def hidden_bytes(loss: Tensor) -> int:
    """Bytes of tensors that the graph of a loss holds beside autograd's own account of saved tensors.

    Such is a gradient that was computed in the forward pass. That of a parameter is left out, as are those that the
    backward pass computes: whichever of the two makes it, it is there when the backward pass begins to free memory.
    """
    found: dict[int, int] = {}
    for node in _nodes(loss.grad_fn):
        inputs = [getattr(before, "variable", None) for before, _ in node.next_functions]
        parameters = [tensor.shape for tensor in inputs if tensor is not None]
        for held in getattr(node, "__dict__", {}).values():
            if isinstance(held, Tensor) and held.shape not in parameters:
                found[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    return sum(found.values())


def _nodes(root: Any) -> Iterator[Any]:
    """Every node of a graph once."""
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]
