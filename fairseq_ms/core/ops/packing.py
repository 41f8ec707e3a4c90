"""Weights packed for CPU inference when fairseq prepares a model for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Rows of input the packed layout is tuned for: beams and batches of generation are about this many.
_PACKED_ROWS = 8

# oneDNN keeps a kernel for every number of rows that a process has multiplied, for good: up to this many they cost next
# to nothing, and each further one half a megabyte for every shape of weight.
_SMALL = 16


class PackedWeight:
    """A weight in oneDNN's blocked layout, good for one CPU tensor until somebody writes to it.

    Generation on a CPU reads every weight once per token, so its speed is that of streaming weights
    from memory; the blocked layout streams about twice as fast as a row-major matrix.

    A copy of it, by ``copy`` or ``pickle``, begins empty and packs the first weight that it is asked about.
    """

    def __init__(self) -> None:
        self.packed: Tensor | None = None
        # A second owner of the weight's memory, which is copied on write: whoever writes to the weight, through
        # ``.data`` and where its version does not count too, moves it to other memory first, and reading it does not.
        # So the weight is what was packed for as long as it lies where it lay, and this costs no memory until then.
        self.snapshot: Tensor | None = None
        self.place: tuple | None = None
        self.fresh = True

    def __reduce__(self) -> tuple:
        return PackedWeight, ()

    @staticmethod
    def supports(weight_OI: Tensor) -> bool:
        """Whether oneDNN can pack this weight: float32 or bfloat16 on a CPU whose build has the operators.

        Its memory must be torch's own, as that of a parameter is unless a NumPy array, another process or a whole
        model in a file gave it: only such memory can be copied on write.
        """
        if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        if not (hasattr(torch, "_lazy_clone") and hasattr(torch._C, "_data_address")):
            return False
        storage = weight_OI.untyped_storage()
        if not storage.resizable() or storage.is_shared():
            return False
        if weight_OI.dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return weight_OI.dtype == torch.float32

    def pack(self, weight_OI: Tensor) -> bool:
        """Take a weight in; whether it could be packed."""
        self.fresh = False
        if not self.supports(weight_OI):
            return False
        # In this order: packing takes write access, which separates the weight from the memory of an older snapshot.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _PACKED_ROWS)
        self.snapshot = torch._lazy_clone(weight_OI.detach())
        self.place = _place(weight_OI)
        return True

    def serves(self, x: Tensor, weight_OI: Tensor) -> bool:
        """Whether the packed copy equals this weight and x can be multiplied by it."""
        if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != weight_OI.dtype:
            return False
        if self.fresh:
            self.pack(weight_OI)
        if self.packed is not None and _place(weight_OI) != self.place:
            self.packed = self.snapshot = None
        return self.packed is not None

    def linear(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``F.linear``, through the packed copy of the weight if it is up to date; x (..., I) -> (..., O)."""
        if not self.serves(x, weight_OI):
            return F.linear(x, weight_OI, bias_O)
        rows_RI = x.reshape(-1, x.size(-1))
        pieces = [
            torch.ops.mkldnn._linear_pointwise(piece_RI, self.packed, bias_O, "none", [], "")
            for piece_RI in rows_RI.split(pieces_of(len(rows_RI)))
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(*x.shape[:-1], weight_OI.size(0))


def _place(tensor: Tensor) -> tuple:
    """Where a tensor's numbers lie, told without asking for leave to write there."""
    memory = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return memory, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def pieces_of(rows: int) -> list[int]:
    """Numbers of rows of which there are few, whatever their sum: 437 are 256, 128, 32, 16 and 5."""
    pieces = []
    while rows > _SMALL:
        pieces.append(1 << (rows.bit_length() - 1))
        rows -= pieces[-1]
    return [*pieces, rows] if rows or not pieces else pieces


def pack(weight_OI: Tensor) -> PackedWeight | None:
    """The packed copy of a weight, or None where packing is not supported."""
    packed = PackedWeight()
    return packed if packed.pack(weight_OI) else None


def pack_weights(model: nn.Module) -> None:
    """Pack the weight of every projection that can, as fairseq's ``make_generation_fast_`` does."""
    for module in model.modules():
        fast = getattr(module, "make_generation_fast_", None)
        if fast is not None:
            fast()
