"""Ensembles of which only some models read the prompts ahead.

fairseq's generator asks the first model of an ensemble whether it has an encoder, and then uses one of every model.
Language models of fairseq's own have none, and ours have one that hands over the prompts (``decoding.PromptReader``).
"""

from __future__ import annotations

from typing import Any

from fairseq.sequence_generator import EnsembleModel
from torch import Tensor


def _has_encoder(self: Any) -> bool:
    return any(hasattr(model, "encoder") for model in self.models)


def _forward_encoder(self: Any, net_input: dict[str, Tensor]) -> list[Any] | None:
    if not self.has_encoder():
        return None
    encoders = [getattr(model, "encoder", None) for model in self.models]
    return [None if encoder is None else encoder.forward_torchscript(net_input) for encoder in encoders]


def _reorder_encoder_out(self: Any, encoder_outs: list[Any] | None, new_order: Tensor) -> list[Any]:
    return [
        None if out is None else model.encoder.reorder_encoder_out(out, new_order)
        for model, out in zip(self.models, encoder_outs or [])
    ]


def install() -> None:
    """Have fairseq's generator use the encoders of those models that have one; calling it again does nothing."""
    EnsembleModel.has_encoder = _has_encoder
    EnsembleModel.forward_encoder = _forward_encoder
    EnsembleModel.reorder_encoder_out = _reorder_encoder_out
