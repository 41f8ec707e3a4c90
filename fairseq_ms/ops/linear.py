"""Linear layers whose weights are packed for CPU inference when fairseq prepares a model for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Rows of input the packed layout is tuned for: beams and batches of generation are about this many.
_PACKED_ROWS = 8


class PackedWeight:
    """A weight in oneDNN's blocked layout, good for one CPU tensor at one version.

    Generation on a CPU reads every weight once per token, so its speed is that of streaming weights
    from memory; the blocked layout streams about twice as fast as a row-major matrix.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self.source = weight_OI
        self.version = weight_OI._version
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _PACKED_ROWS)

    @staticmethod
    def supports(weight_OI: Tensor) -> bool:
        """Whether oneDNN can pack this weight: float32 or bfloat16 on a CPU whose build has the operators."""
        if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        if weight_OI.dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return weight_OI.dtype == torch.float32

    def serves(self, x: Tensor, weight_OI: Tensor) -> bool:
        """Whether the packed copy still equals this weight and x can be multiplied by it."""
        return (
            weight_OI is self.source
            and weight_OI._version == self.version
            and x.dtype == weight_OI.dtype
            and x.device.type == "cpu"
            and not torch.is_grad_enabled()
        )

    def linear(self, x: Tensor, bias_O: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``; x (..., I) -> (..., O)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias_O, "none", [], "")


def pack(weight_OI: Tensor) -> PackedWeight | None:
    """The packed copy of a weight, or None where packing is not supported."""
    return PackedWeight(weight_OI) if PackedWeight.supports(weight_OI) else None


def packed_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, packed: PackedWeight | None) -> Tensor:
    """``F.linear``, through the packed copy of the weight where there is one and it is up to date."""
    if packed is not None and packed.serves(x, weight_OI):
        return packed.linear(x, bias_O)
    return F.linear(x, weight_OI, bias_O)


class Linear(nn.Linear):
    """``nn.Linear`` that packs its weight when fairseq calls ``make_generation_fast_``.

    The packed copy is not part of the state dict, is dropped when the module moves to another device or
    type, and is ignored while gradients are enabled or once the weight has changed.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.packed: PackedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return packed_linear(x, self.weight, self.bias, self.packed)

    def make_generation_fast_(self, **unused: object) -> None:
        """fairseq's hook, called once before evaluation and generation."""
        self.packed = pack(self.weight)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        self.packed = None
        return super()._apply(fn, recurse)
