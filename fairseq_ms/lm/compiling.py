"""``--compile-layers``: each transformer layer under ``torch.compile``, for training."""

from __future__ import annotations

import torch
from torch import nn

from fairseq_ms.core.layers import TransformerLayer
from fairseq_ms.core.streaming import TransformerXLLayer
from fairseq_ms.errors import UsageError

_LAYERS = (TransformerLayer, TransformerXLLayer)


def compile_layers(model: nn.Module) -> None:
    """Have ``torch.compile`` run every layer of a model, at its first call; no parameter changes its name.

    Raises ``UsageError`` where nothing can be compiled.
    """
    _require_compiler()
    for module in model.modules():
        if isinstance(module, _LAYERS):
            # Rows and segments have many lengths: one graph serves them all.
            module.compile(dynamic=True)


def _require_compiler() -> None:
    """Compile something small, so that a training without a compiler ends before it begins."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(torch.exp2)(torch.ones(8, device=device))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"--compile-layers needs a compiler that torch.compile can use for {device}: {reason}"
        ) from error
