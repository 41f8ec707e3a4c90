"""Muon for the matrices of a model's layers beside AdamW for everything else, and which parameters are which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_ms.core.adaptive import AdaptiveInput, AdaptiveSoftmax
from fairseq_ms.core.layers import QueryKey
from fairseq_ms.core.model import CausalModel
from fairseq_ms.core.ops.device import has_fused_optimizers
from fairseq_ms.core.ops.orthogonal import orthogonalised

# What Muon's rate is multiplied by for a matrix (O, I), by the names that torch has for it.
RATES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


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


def undecayed(model: nn.Module) -> list[nn.Parameter]:
    """What no weight decay is for: the temperatures and sinks of heads, which are scores and not weights."""
    scores = [getattr(m, name) for m in model.modules() if isinstance(m, QueryKey) for name in ("temperature", "sinks")]
    return [parameter for parameter in scores if parameter is not None]


def rows_of_projections(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """The matrices of ``matrices_and_others``, and how many rows of each belong to the same projection.

    Queries, keys and values share a weight; Muon makes the update of each of them orthogonal by itself.
    """
    shared = {m.weight: m.rows for m in model.modules() if isinstance(m, nn.Linear) and hasattr(m, "rows")}
    return {matrix: shared.get(matrix, (matrix.size(0),)) for matrix in matrices_and_others(model)[0]}


def muon_and_adamw(
    model: nn.Module,
    lr: float,
    adam_lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
) -> MuonAndAdamW:
    """One optimizer for a whole model: Muon at ``lr`` for the matrices of its layers, AdamW for all other parameters.

    ``weight_decay`` is that of both, decoupled, times the rate. Schedulers, checkpoints and copies take it for one
    optimizer with two groups, and a third without decay for what is ``undecayed``. Raises RuntimeError where torch has
    no Muon.
    """
    adamw, decay = {"betas": betas, "weight_decay": weight_decay}, {"weight_decay": weight_decay}
    without = {id(parameter): parameter for parameter in undecayed(model)}
    others = [parameter for parameter in matrices_and_others(model)[1] if id(parameter) not in without]
    optimizer = MuonAndAdamW(rows_of_projections(model), others, lr, adam_lr, decay, adamw)
    if without:
        optimizer.add_param_group({"params": list(without.values()), "weight_decay": 0.0})
    return optimizer


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for groups of parameters that have ``rows``, and AdamW for all others, with one state.

    ``rows`` are those of the projections in each matrix of a group, each of which Muon updates by itself; those of one
    shape are computed together (``ops.orthogonal``).

    Args:
        projections: the matrices of a first group, and their rows
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
        # torch's own look at the settings.
        self.of_muon = torch.optim.Muon(list(projections), lr=lr, **muon).defaults
        of_adamw = torch.optim.AdamW(others, lr=adam_lr, fused=has_fused_optimizers(others), **adamw).defaults
        # Without an effect on Muon: schedulers that turn momentum want one in every group.
        self.of_muon["betas"] = of_adamw["betas"]
        groups: list[dict[str, Any]] = [{"params": list(projections), "rows": list(projections.values())}]
        super().__init__([*groups, {"params": others}], of_adamw)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "of_muon": self.of_muon}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's: a group of AdamW's, or with ``rows`` of Muon's; raises ValueError if they do not fit it."""
        of_adamw = self.defaults
        self.defaults = self.of_muon if "rows" in param_group else of_adamw
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = of_adamw
        group = self.param_groups[-1]
        shapes = [tuple(parameter.shape) for parameter in group["params"]]
        fits = (len(shape) == 2 and shape[0] == sum(rows) for shape, rows in zip(shapes, group.get("rows", ())))
        if "rows" in group and (len(group["rows"]) != len(shapes) or not all(fits)):
            del self.param_groups[-1]
            raise ValueError(f"rows must be those of the projections in matrices {shapes}: got {group['rows']}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; which rows belong together is the model's, and states from before ``rows`` load too."""
        rows = [group.get("rows") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, rows, strict=True):
            if own is not None:
                group["rows"] = own

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; what ``closure`` computes, if it is given."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            if "rows" in group:
                self._update_matrices(group)
        if others := [group for group in self.param_groups if "rows" not in group]:
            # For this update alone: what lasts is in groups and state, which are copied and saved.
            adamw = torch.optim.AdamW(others)
            adamw.state = self.state
            adamw.step()
        return loss

    def _update_matrices(self, group: Mapping[str, Any]) -> None:
        """One update of a group by Muon: projections of one shape together, by as many launches as one of them."""
        lr, momentum = float(group["lr"]), group["momentum"]
        alike: dict[Any, list[tuple[Tensor, ...]]] = {}
        for parameter, rows in zip(group["params"], group["rows"], strict=True):
            if parameter.grad is None:
                continue
            own = self.state[parameter]
            if "momentum_buffer" not in own:
                own["momentum_buffer"] = torch.zeros_like(parameter)
            if hasattr(parameter, "full_tensor"):
                _update_sharded(group, parameter, rows, own["momentum_buffer"])
                continue
            parts = (whole.split(rows) for whole in (parameter, parameter.grad, own["momentum_buffer"]))
            for piece in zip(*parts, strict=True):
                alike.setdefault((piece[0].shape, piece[0].dtype, piece[0].device), []).append(piece)
        for (shape, dtype, _), pieces in alike.items():
            weights, gradients, momenta = zip(*pieces, strict=True)
            torch._foreach_lerp_(momenta, gradients, 1 - momentum)
            updates = torch._foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta
            moves = orthogonalised(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            # Laid out as the weights are: only then is adding all of them one launch.
            moves = moves.contiguous().to(dtype)
            rate = lr * RATES[group["adjust_lr_fn"] or "original"](*shape)
            torch._foreach_add_(weights, moves.unbind(0), alpha=-rate)


def _update_sharded(group: Mapping[str, Any], parameter: Any, rows: tuple[int, ...], momentum: Any) -> None:
    """``MuonAndAdamW``'s update of a matrix of which every process has a part: each computes the whole of its move."""
    from torch.distributed.tensor import distribute_tensor  # which loads more than all of the core

    lr, gradient = float(group["lr"]), parameter.grad
    momentum.lerp_(gradient, 1 - group["momentum"])
    update: Any = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    moves = []
    for piece in update.full_tensor().split(rows):
        move_OI = orthogonalised([piece], group["ns_coefficients"], group["ns_steps"], group["eps"])[0]
        moves.append(move_OI.to(piece.dtype) * (lr * RATES[group["adjust_lr_fn"] or "original"](*piece.shape)))
    own = distribute_tensor(torch.cat(moves), parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.mul_(1 - lr * group["weight_decay"]).sub_(own)
