"""Muon for the matrices of a model's layers and AdamW for all other parameters, in one optimizer."""

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

# Factors of Muon's learning rate for a matrix (O, I), by torch's names for them (``adjust_lr_fn``).
RATES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split a model's parameters into the matrices of its layers, for Muon, and all others, for AdamW.

    Matrices are the weights (O, I) of projections within the model. Embeddings, output projections, norms, biases and
    LSTMs are others. Both lists are in the model's order.
    """
    modules = list(model.modules())
    apart: list[nn.Module] = [m for m in modules if isinstance(m, nn.Embedding | AdaptiveInput | AdaptiveSoftmax)]
    apart += [m.project for m in modules if isinstance(m, CausalModel) and m.project is not None]
    symbols = {id(parameter) for module in apart for parameter in module.parameters()}
    inner = {id(m.weight) for m in modules if isinstance(m, nn.Linear)} - symbols
    parameters = list(model.parameters())
    return [p for p in parameters if id(p) in inner], [p for p in parameters if id(p) not in inner]


def undecayed(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that should not decay: temperatures and sinks of heads, which are scores and not weights."""
    scores = [getattr(m, name) for m in model.modules() if isinstance(m, QueryKey) for name in ("temperature", "sinks")]
    return [parameter for parameter in scores if parameter is not None]


def rows_of_projections(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """The matrices of ``matrices_and_others``, with the numbers of rows of the projections that share each.

    Muon orthogonalises queries, keys and values one by one, though they share a weight.
    """
    shared = {m.weight: m.rows for m in model.modules() if isinstance(m, nn.Linear) and hasattr(m, "rows")}
    return {matrix: shared.get(matrix, (matrix.size(0),)) for matrix in matrices_and_others(model)[0]}


def muon_and_adamw(
    model: nn.Module, lr: float, adam_lr: float, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.999)
) -> MuonAndAdamW:
    """Muon at the rate ``lr`` for the matrices of a model's layers, AdamW at ``adam_lr`` for all other parameters.

    ``weight_decay`` is decoupled, for both. There are two parameter groups, and a third without decay if some
    parameters are ``undecayed``. Raises RuntimeError where torch has no Muon.
    """
    adamw, decay = {"betas": betas, "weight_decay": weight_decay}, {"weight_decay": weight_decay}
    without = {id(parameter): parameter for parameter in undecayed(model)}
    others = [parameter for parameter in matrices_and_others(model)[1] if id(parameter) not in without]
    optimizer = MuonAndAdamW(rows_of_projections(model), others, lr, adam_lr, decay, adamw)
    if without:
        optimizer.add_param_group({"params": list(without.values()), "weight_decay": 0.0})
    return optimizer


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for parameter groups with ``rows``, AdamW for groups without, and one state dict for both.

    ``rows`` has for each matrix of a group the numbers of rows of its projections. Muon updates every projection by
    itself; projections of one shape are computed together (``ops.orthogonal``).

    Args:
        projections: the matrices of the first group, with their rows
        others: the parameters of the second group
        lr: learning rate of Muon
        adam_lr: learning rate of AdamW
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
        """Add a group, for Muon if it has ``rows``; raises ValueError for rows that do not fit its matrices."""
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
        """Load a state; ``rows`` stay this optimizer's own, so that states from before there were any load, too."""
        rows = [group.get("rows") for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, rows, strict=True):
            if own is not None:
                group["rows"] = own

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; returns the result of ``closure``, if there is one."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            if "rows" in group:
                self._update_matrices(group)
        if others := [group for group in self.param_groups if "rows" not in group]:
            # An optimizer for this update alone, over our groups and state, which are what is copied and saved.
            adamw = torch.optim.AdamW(others)
            adamw.state = self.state
            adamw.step()
        return loss

    def _update_matrices(self, group: Mapping[str, Any]) -> None:
        """Update a group by Muon, all projections of one shape in as many launches as one of them."""
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
            # Contiguous, as the weights are: otherwise adding them would be a launch for each.
            moves = moves.contiguous().to(dtype)
            rate = lr * RATES[group["adjust_lr_fn"] or "original"](*shape)
            torch._foreach_add_(weights, moves.unbind(0), alpha=-rate)


def _update_sharded(group: Mapping[str, Any], parameter: Any, rows: tuple[int, ...], momentum: Any) -> None:
    """Update a matrix that is sharded over processes: each process computes the whole update, and takes its part."""
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
