"""The two kinds of parameters that optimizers for matrices tell apart."""

from __future__ import annotations

from torch import nn

from fairseq_ms.core.adaptive import AdaptiveInput, AdaptiveSoftmax
from fairseq_ms.core.model import CausalModel
from fairseq_ms.core.ops.linear import Linear


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of a model's layers, for ``torch.optim.Muon``, and all other parameters, for AdamW.

    Matrices are the weights (O, I) of projections within the model. The others are embeddings, what predicts symbols,
    norms, biases, and LSTMs. Every parameter is in one of the lists, once, in the model's order.
    """
    modules = list(model.modules())
    apart: list[nn.Module] = [m for m in modules if isinstance(m, nn.Embedding | AdaptiveInput | AdaptiveSoftmax)]
    apart += [m.project for m in modules if isinstance(m, CausalModel) and m.project is not None]
    symbols = {id(parameter) for module in apart for parameter in module.parameters()}
    inner = {id(m.weight) for m in modules if isinstance(m, nn.Linear)} - symbols
    parameters = list(model.parameters())
    return [p for p in parameters if id(p) in inner], [p for p in parameters if id(p) not in inner]


def rows_of_projections(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """The matrices of ``matrices_and_others``, and how many rows of each belong to the same projection.

    Queries, keys and values share a weight; Muon makes the update of each of them orthogonal by itself.
    """
    shared = {m.weight: m.rows for m in model.modules() if isinstance(m, Linear) and m.rows}
    return {matrix: shared.get(matrix, (matrix.size(0),)) for matrix in matrices_and_others(model)[0]}
