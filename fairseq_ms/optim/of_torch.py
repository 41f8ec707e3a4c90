"""torch's own optimizers: `--optimizer adamw`, and `--optimizer muon`, which is Muon and AdamW side by side."""

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, List, Optional  # noqa: UP035  (fairseq reads the types of its dataclasses)

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.fused_adam import get_fused_adam_class
from omegaconf import II
from torch import nn

from fairseq_ms.core.ops.device import has_fused_optimizers
from fairseq_ms.core.optimizers import MuonAndAdamW, rows_of_projections, undecayed
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.choices import option
from fairseq_ms.lm.config import betas, check_ranges, flag

# fairseq copies it to the float32 masters of half precision.
_UNDECAYED = "without decay"


@dataclass
class AdamWFlags(FairseqDataclass):
    """Flags of `--optimizer adamw`; they are those of fairseq's adam."""

    adam_betas: Any = option((0.9, 0.999), "betas of AdamW")
    adam_eps: float = option(1e-8, "epsilon of AdamW")
    weight_decay: float = option(0.0, "decoupled weight decay, times the learning rate")
    lr: List[float] = field(default=II("optimization.lr"))  # noqa: UP006


@dataclass
class MuonFlags(AdamWFlags):
    """Flags of `--optimizer muon`."""

    adam_lr: Optional[float] = option(
        None,
        "learning rate of AdamW, which trains all but the layers' matrices; it follows the schedule of "
        "--lr, Muon's, in proportion (required)",
    )


def _settings(cfg: AdamWFlags) -> dict[str, Any]:
    return {"betas": betas(cfg.adam_betas), "eps": cfg.adam_eps, "weight_decay": cfg.weight_decay}


def _rate(cfg: AdamWFlags) -> float:
    """The first of the rates that `--lr` gives."""
    return float(cfg.lr[0] if isinstance(cfg.lr, Collection) else cfg.lr)


def _decays(parameter: nn.Parameter) -> bool:
    """Whether ``note_undecayed`` has not noted it."""
    return getattr(parameter, "param_group", None) != _UNDECAYED


@register_optimizer("adamw", dataclass=AdamWFlags)
class FairseqAdamW(FairseqOptimizer):
    """torch's AdamW, or NVIDIA Apex's where that is installed and there is a GPU."""

    def __init__(self, cfg: AdamWFlags, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        params = list(params)
        apex = get_fused_adam_class() if torch.cuda.is_available() else None
        adamw = apex or partial(torch.optim.AdamW, fused=has_fused_optimizers(params))
        self._optimizer = adamw(list(filter(_decays, params)), lr=_rate(cfg), **_settings(cfg))
        if without := list(itertools.filterfalse(_decays, params)):
            self._optimizer.add_param_group({"params": without, "weight_decay": 0.0})

    @property
    def supports_flat_params(self) -> bool:
        """fairseq may give it all parameters as one vector, as it does under `--fp16`."""
        return True


@register_optimizer("muon", dataclass=MuonFlags)
class FairseqMuon(FairseqOptimizer):
    """torch's Muon for the matrices that ``prepare_muon`` has noted, and AdamW for all other parameters."""

    def __init__(self, cfg: MuonFlags, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        rows = {parameter: getattr(parameter, "param_group", None) for parameter in params}
        matrices = {parameter: given for parameter, given in rows.items() if isinstance(given, tuple)}
        others = [parameter for parameter in filter(_decays, rows) if parameter not in matrices]
        if not matrices:
            got = f"{len(others)} other parameters"
            raise UsageError(f"--optimizer muon must be left out where there are no matrices of layers: got {got}")
        muon = {"weight_decay": cfg.weight_decay}
        self._optimizer = MuonAndAdamW(matrices, others, _rate(cfg), float(cfg.adam_lr), muon, _settings(cfg))  # type: ignore[arg-type]
        if without := list(itertools.filterfalse(_decays, rows)):
            self._optimizer.add_param_group({"params": without, "weight_decay": 0.0})

    def set_lr(self, lr: float) -> None:
        """The schedule's rate for the matrices, and as large a part of its own for all others."""
        for group in self.param_groups:
            group["lr"] = lr if "rows" in group else lr / _rate(self.cfg) * self.cfg.adam_lr


def not_followed(cfg: Any, optimizer: Any) -> list[str]:
    """Flags of an Adam that its groups, loaded with a checkpoint, do not follow: what they have, and what is given."""
    found = []
    for name, key in (("weight_decay", "weight_decay"), ("adam_eps", "eps"), ("adam_betas", "betas")):
        if (given := getattr(cfg, name, None)) is None:
            continue
        groups = [group for group in optimizer.param_groups if key in group]
        given = betas(given) if key == "betas" else given
        has = [tuple(group[key]) if key == "betas" else group[key] for group in groups]
        if has and given not in has:
            found.append(f"{flag(name)} stays {has[0]}, which the checkpoint has, for all that {given} is given")
    return found


def note_undecayed(cfg: Any, model: nn.Module) -> None:
    """Note what is not decayed, and have fairseq keep its shapes in half precision."""
    for parameter in undecayed(model):
        parameter.param_group = _UNDECAYED  # type: ignore[attr-defined]
        cfg.common.fp16_no_flatten_grads = True


def prepare_muon(cfg: Any, model: nn.Module) -> None:
    """Note what projections a model's matrices hold, and have fairseq keep their shapes in half precision.

    Raises ``UsageError`` for settings that Muon cannot have; ``cfg`` are those of a whole training.
    """
    own = cfg.optimizer
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(f"--optimizer muon needs torch 2.9 or newer: this is torch {torch.__version__}")
    if not type(model).__module__.startswith("fairseq_ms."):
        raise UsageError(
            f"--optimizer muon knows the matrices of fairseq_ms's models alone: got {type(model).__name__}"
        )
    for name, given in (
        ("--memory-efficient-fp16", cfg.common.memory_efficient_fp16),
        ("--memory-efficient-bf16", cfg.common.memory_efficient_bf16),
        ("--zero-sharding os", cfg.distributed_training.zero_sharding == "os"),
    ):
        if given:
            raise UsageError(f"{name} must be left out with --optimizer muon, which needs whole matrices in float32")
    if own.adam_lr is None:
        raise UsageError("--adam-lr must be given with --optimizer muon: the rate of embeddings, norms and biases")
    for name, rate in (("--lr", _rate(own)), ("--adam-lr", own.adam_lr)):
        if not 0.0 < rate < math.inf:
            raise UsageError(f"{name} must be above 0 with --optimizer muon: got {rate}")
    check_ranges(MuonFlags.__dataclass_fields__, own)
    cfg.common.fp16_no_flatten_grads = True
    for matrix, rows in rows_of_projections(model).items():
        matrix.param_group = rows  # type: ignore[attr-defined]
