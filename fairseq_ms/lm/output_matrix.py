"""A model's output projection, for criterions that work on features instead of logits."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from fairseq_ms.core.ops.linear_cross_entropy import matrix_of
from fairseq_ms.lm.base import Decoder

# The attribute of a decoder that projects, by the method whose output it alone is: subclasses may do more there.
_PROJECTIONS = {Decoder.output_layer: "project", TransformerDecoderBase.output_layer: "output_projection"}


def unwrapped(model: Any) -> Any:
    """A model without what wraps it for distributed training."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def output_projection(model: Any) -> nn.Module | None:
    """The linear module without bias that maps features to logits; None if the model has none.

    ``model`` is one of this package or a Transformer of fairseq's, perhaps wrapped for distributed training.
    """
    decoder = getattr(unwrapped(model), "decoder", None)
    name = _PROJECTIONS.get(getattr(type(decoder), "output_layer", None))
    if name is None or getattr(decoder, "adaptive_softmax", None) is not None:
        return None
    projection = getattr(decoder, name)
    return None if getattr(projection, "bias", None) is not None else projection


def output_matrix(model: Any) -> tuple[Tensor, tuple[int, ...]] | None:
    """``matrix_of`` the output projection; None if there is none, and if it has to be called."""
    projection = output_projection(model)
    return None if projection is None else matrix_of(projection)


def without_output_matrix(model: Any) -> str | None:
    """A description, for errors, of a model without such a projection; None for a model with one."""
    if output_projection(model) is not None:
        return None
    adaptive = getattr(getattr(model, "decoder", None), "adaptive_softmax", None) is not None
    return f"a {type(model).__name__}" + (" with adaptive softmax, which --criterion adaptive_loss trains" * adaptive)
