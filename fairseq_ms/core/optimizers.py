"""Muon for the matrices of a model's layers beside AdamW for everything else, and which parameters are which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fairseq_ms.core.adaptive import AdaptiveInput, AdaptiveSoftmax
from fairseq_ms.core.model import CausalModel
from fairseq_ms.core.ops.device import has_fused_optimizers
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


def muon_and_adamw(
    model: nn.Module,
    lr: float,
    adam_lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
) -> MuonAndAdamW:
    """One optimizer for a whole model: Muon at ``lr`` for the matrices of its layers, AdamW for all other parameters.

    ``weight_decay`` is that of both, decoupled, times the rate. Schedulers and checkpoints take it for one optimizer
    with two groups. Raises RuntimeError where torch has no Muon.
    """
    adamw = {"betas": betas, "weight_decay": weight_decay}
    others = matrices_and_others(model)[1]
    return MuonAndAdamW(rows_of_projections(model), others, lr, adam_lr, {"weight_decay": weight_decay}, adamw)


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for a first group of parameters and AdamW for a second one, with one state.

    Args:
        projections: the matrices, and the rows of the projections in each, which Muon takes one by one
        others: all other parameters
        lr: rate of Muon
        adam_lr: rate of AdamW
        muon: further settings of ``torch.optim.Muon``
        adamw: further settings of ``torch.optim.AdamW``
    """

    def __init__(
        self,
        projections: Mapping[nn.Parameter, tuple[int, ...]],
        others: Iterable[nn.Parameter],
        lr: float,
        adam_lr: float,
        muon: Mapping[str, Any],
        adamw: Mapping[str, Any],
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"Muon needs torch 2.9 or newer: this is torch {torch.__version__}")
        others = list(others)
        self._rows = list(projections.values())
        self._muon = torch.optim.Muon(list(projections), lr=lr, **muon)
        self._adamw = torch.optim.AdamW(others, lr=adam_lr, fused=has_fused_optimizers(others), **adamw)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; what ``closure`` computes, if it is given."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        matrices, others = self.param_groups
        self._muon.state.clear()
        pieces = [piece for pair in zip(matrices["params"], self._rows) for piece in self._projections(*pair)]
        self._muon.param_groups = [{**matrices, "params": pieces}]
        self._muon.step()
        self._adamw.param_groups, self._adamw.state = [others], self.state
        self._adamw.step()
        return loss

    def _projections(self, parameter: nn.Parameter, rows: tuple[int, ...]) -> Iterator[nn.Parameter]:
        """Parts of a parameter, each a parameter in the memory of the whole, and so are gradient and momentum."""
        if parameter.grad is None:
            return
        momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        parts = (whole.split(rows) for whole in (parameter, parameter.grad, momentum))
        for weight, gradient, buffer in zip(*parts, strict=True):
            piece = nn.Parameter(weight)
            piece.grad = gradient
            self._muon.state[piece] = {"momentum_buffer": buffer}
            yield piece
