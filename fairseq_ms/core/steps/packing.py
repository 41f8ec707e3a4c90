"""Weights packed for generation on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops.plain import SameProduct

# Rows of input the packed layout is tuned for: beams and batches of generation are about this many.
_PACKED_ROWS = 8

# oneDNN keeps a kernel for every number of rows it has multiplied: up to this many they are nearly free, each one more
# costs half a megabyte for every shape of weight.
_SMALL = 16


class PackedWeight:
    """A weight in oneDNN's blocked layout, packed at its first product and again when it has changed.

    Generation on a CPU reads every weight once per token, so its speed is that of streaming weights
    from memory; the blocked layout streams about twice as fast as a row-major matrix.

    A change is noticed by the weight's address and autograd's version counter, so writing through ``.data`` is not. A
    copy, by ``copy`` or ``pickle``, begins empty.
    """

    def __init__(self) -> None:
        self.packed: Tensor | None = None
        self.packed_from: tuple | None = None
        # Keeps the memory of what was packed, so that no other weight comes to lie there and is taken for it.
        self.held: Tensor | None = None

    def __reduce__(self) -> tuple:
        return PackedWeight, ()

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
        """Whether x is multiplied by the packed weight: not where gradients are enabled, nor in another type."""
        # What is no parameter may be computed anew for every call, and lie where another one lay.
        if torch.is_grad_enabled() or x.dtype != weight_OI.dtype or type(weight_OI) is not nn.Parameter:
            return False
        if x.device.type != "cpu":
            self.packed = self.packed_from = self.held = None
            return False
        version = None if weight_OI.is_inference() else weight_OI._version
        found = weight_OI.data_ptr(), version, weight_OI.dtype, weight_OI.shape, weight_OI.stride()
        if found != self.packed_from:
            self.packed_from, self.packed, self.held = found, None, weight_OI.detach()
            if self.supports(weight_OI):
                self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _PACKED_ROWS)
        return self.packed is not None

    def linear(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``F.linear``, through the packed weight if that serves; x (..., I) -> (..., O)."""
        if not self.serves(x, weight_OI):
            return F.linear(x, weight_OI, bias_O)
        rows_RI = x.reshape(-1, x.size(-1))
        pieces = [
            torch.ops.mkldnn._linear_pointwise(piece_RI, self.packed, bias_O, "none", [], "")
            for piece_RI in rows_RI.split(pieces_of(len(rows_RI)))
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(*x.shape[:-1], weight_OI.size(0))


class PackedLinear(SameProduct):
    """The forward pass of an ``nn.Linear`` by its packed weight."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, self.packed = linear, PackedWeight()

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return self.packed.linear(x, self.linear.weight, self.linear.bias)


def pack(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Have the weights of a model that only generates packed; of each module for which that is new, what it now has.

    That is a ``forward`` of its own for what ``linear.projection`` makes, which stays an ``nn.Linear``, and a
    ``product`` for a module that multiplies by another one's weight.
    """
    new: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if type(module) is nn.Linear and hasattr(module, "rows") and "forward" not in vars(module):
            new.append((module, "forward"))
            module.forward = PackedLinear(module)  # type: ignore[method-assign, assignment]
        elif getattr(type(module), "product", None) is F.linear and "product" not in vars(module):
            new.append((module, "product"))
            module.product = PackedWeight().linear  # type: ignore[assignment]
    return new


def pieces_of(rows: int) -> list[int]:
    """Pieces of few different sizes that make up any number of rows: 437 are 256, 128, 32, 16 and 5."""
    pieces = []
    while rows > _SMALL:
        pieces.append(1 << (rows.bit_length() - 1))
        rows -= pieces[-1]
    return [*pieces, rows] if rows or not pieces else pieces


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluate with packed weights inside the block; afterwards the model trains as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    packed = pack(model)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module, name in packed:
            vars(module).pop(name, None)
