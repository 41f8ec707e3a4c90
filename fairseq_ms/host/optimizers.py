"""A trainer's optimizer is given its parameters without their names: Muon has to know which are matrices of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.trainer import Trainer

from fairseq_ms.host.wrapping import wrap


def install() -> None:
    """Have trainers prepare their model for Muon; calling it again does nothing."""
    wrap(Trainer, "__init__", _prepared)


def _prepared(original: Callable[..., None], trainer: Any, *args: Any, **settings: Any) -> None:
    """``Trainer()``, which builds its optimizer later on."""
    original(trainer, *args, **settings)
    if getattr(trainer.cfg.optimizer, "_name", None) == "muon":
        from fairseq_ms.optim.of_torch import prepare_muon

        prepare_muon(trainer.cfg, trainer.get_model())
