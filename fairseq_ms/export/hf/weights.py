"""Names of weights: which are one parameter, and which tensors a checkpoint of fairseq's leaves out."""

from __future__ import annotations

from torch import nn


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several, and its first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def keep_derived_buffers(model: nn.Module) -> None:
    """Make the buffers that are derived from the dictionary part of the state dict.

    ``transformers`` builds a model without memory for its tensors and then reads them all from the file: what a
    constructor has written is gone by then.
    """
    for module in model.modules():
        module._non_persistent_buffers_set.clear()
