"""Retina attention by itself, against dense flash attention and dense masks, from short to long sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.device import Device
from benchmarks.gpu.rows import GB, PRECISIONS, Cell, Row, Table
from benchmarks.gpu.timing import QUICK, Effort, seconds
from benchmarks.retina_attention import GROUPS, HEAD_DIM, Dense, Inputs
from fairseq_ms.analysis.saved_bytes import saved_bytes

HEADS = sum(group.heads for group in GROUPS)
FLASH = "dense flash attention"
# As many tokens at every length.
TOKENS = 32_768


class Flash:
    """Causal attention of as many heads over all keys, by torch's flash attention and nothing else."""

    def __init__(self, inputs: Inputs) -> None:
        fine = inputs.tensors[0]
        self.qkv = torch.randn(*fine.shape[:2], 3 * HEADS * HEAD_DIM, device=fine.device, dtype=fine.dtype)
        self.qkv.requires_grad_()

    def __call__(self) -> Tensor:
        q, k, v = self.qkv.unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _windows(inputs: Inputs) -> tuple[Callable[[], Tensor], list[Tensor]]:
    # Not the CPU's path, which ``inputs.sparse`` takes.
    return lambda: inputs.windows.by_autograd(*inputs.tensors), inputs.tensors


def _flash(inputs: Inputs) -> tuple[Callable[[], Tensor], list[Tensor]]:
    flash = Flash(inputs)
    return flash, [flash.qkv]


def _masks(inputs: Inputs) -> tuple[Callable[[], Tensor], list[Tensor]]:
    return Dense(inputs), inputs.tensors


KINDS = {FLASH: _flash, "dense masks": _masks, "windows": _windows}


def tables(quick: bool) -> list[Table]:
    """Every length in both precisions."""
    lengths = (64, 128) if quick else (512, 2048, 8192, 32_768)
    rows = [
        Row(
            (kind, str(length), precision),
            partial(numbers, kind=kind, length=length, rows=1 if quick else TOKENS // length, dtype=dtype, quick=quick),
            group=f"{length}, {precision}",
        )
        for precision, dtype in PRECISIONS.items()
        for length in lengths
        for kind in KINDS
    ]
    windows = ", ".join(f"{group.factor}x={group.near}:{group.far}" for group in GROUPS)
    about = (
        f"Forward and backward of the attention alone: windows {windows}, {HEADS} heads of {HEAD_DIM}, as many rows as "
        f"make {TOKENS:,} tokens, without dropout. Ratios are to causal flash attention of as many heads to all keys."
    )
    columns = {"token": "us a token", "kept": "kept for backward, bytes a token", "peak": "peak, GB"}
    return [
        Table("retina", "Retina attention", about, ["attention", "T", "precision"], columns, rows, "token", FLASH),
    ]


def numbers(device: Device, kind: str, length: int, rows: int, dtype: torch.dtype, quick: bool) -> Mapping[str, Cell]:
    """Time and memory of one kind of attention."""
    inputs = Inputs(length, rows, device.torch, dtype)
    forward, differentiated = KINDS[kind](inputs)

    def run() -> None:
        torch.autograd.grad(forward(), differentiated, inputs.grad)

    peak = device.peak(run)
    taken = seconds(device, run, QUICK if quick else Effort())
    tokens = rows * length
    return {
        "token": [1e6 * value / tokens for value in taken],
        "kept": saved_bytes(forward) / tokens,
        "peak": peak / GB,
    }
