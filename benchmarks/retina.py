"""Retina attention by itself, against dense flash attention and dense masks, from short to long sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from benchmarks.device import peak
from benchmarks.table import DTYPES, GB, TIME, Cell, Options, Row, Table, Work, assert_parity, to
from fairseq_ms.core.ops.window_attention import HeadGroup, Layouts, WindowAttention
from fairseq_ms.tools.saved_bytes import saved_bytes

HEAD_DIM = 64
GROUPS = [HeadGroup(1, 0, 8, 4), HeadGroup(4, 8, 256, 4), HeadGroup(16, 256, 512, 4)]
HEADS = sum(group.heads for group in GROUPS)
FLASH, MASKS, WINDOWS = KINDS = ("dense flash attention", "dense masks", "windows")
# As many tokens at every length, on a GPU.
TOKENS = 32_768
# Queries and keys of unit variance, up to 512 of them in a softmax; gradients are sums of up to 71 products.
TOLERANCE = 2e-5


@dataclass
class Inputs:
    """Projections as a layer has them: queries of all groups with the fine keys and values, and the coarse pairs."""

    length: int
    rows: int = 1
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        width = HEAD_DIM * GROUPS[0].heads
        dim = HEAD_DIM * HEADS
        shapes = [(self.rows, self.length, dim + 2 * width)]
        shapes += [(self.rows, self.length // group.factor, 2 * HEAD_DIM * group.heads) for group in GROUPS[1:]]
        device, dtype = torch.device(self.device), self.dtype
        self.tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        self.grad = torch.randn(self.rows, self.length, dim, device=device, dtype=dtype)
        self.windows = WindowAttention(Layouts(GROUPS, self.length, device), HEAD_DIM, 0.0)
        self.qkv = torch.randn(self.rows, self.length, 3 * dim, device=device, dtype=dtype, requires_grad=True)

    def forward(self, kind: str) -> Callable[[], Tensor]:
        """Attention (B, T, D) of one kind; ``windows`` is what ``retina_lm`` computes in training."""
        if kind == FLASH:
            return self.flash
        if kind == MASKS:
            return Dense(self)
        if self.grad.device.type == "cpu":
            return lambda: _Windows.apply(self.windows, *self.tensors)
        return lambda: self.windows.by_autograd(*self.tensors)

    def flash(self) -> Tensor:
        """Causal attention of as many heads over all keys, by torch's own."""
        q, k, v = self.qkv.unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def gradients(self, kind: str, forward: Callable[[], Tensor]) -> list[Tensor]:
        """The output and the gradients of the projections."""
        output = forward()
        wanted = [self.qkv] if kind == FLASH else self.tensors
        return [output.detach(), *torch.autograd.grad(output, wanted, self.grad)]


class _Windows(torch.autograd.Function):
    """``WindowAttention`` without the projection after it."""

    @staticmethod
    def forward(ctx: Any, windows: WindowAttention, *inputs: Tensor) -> Tensor:
        ctx.windows = windows
        ctx.save_for_backward(*inputs)
        return windows.forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *ctx.windows.backward(grad, *ctx.saved_tensors)[1]


class Dense:
    """The same attention by ``scaled_dot_product_attention`` over all keys of a scale, with masks built once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.masks = []
        like = inputs.grad
        positions = torch.arange(inputs.length, device=like.device)
        for group in GROUPS:
            visible = group.visible(positions[:, None], positions[: inputs.length // group.factor])
            sees_a_key = visible.any(-1, keepdim=True)
            bias = like.new_zeros(visible.shape).masked_fill_(~(visible | ~sees_a_key), -torch.inf)
            self.masks.append((bias, sees_a_key.to(like.dtype)))

    def __call__(self) -> Tensor:
        fine, *coarse = self.inputs.tensors
        widths = [HEAD_DIM * group.heads for group in GROUPS]
        *queries, pair = fine.split([*widths, 2 * widths[0]], dim=-1)
        heads = []
        for group, (bias, sees_a_key), q, both in zip(GROUPS, self.masks, queries, [pair, *coarse]):
            q = q.unflatten(-1, (group.heads, HEAD_DIM)).transpose(1, 2)
            k, v = both.unflatten(-1, (2, group.heads, HEAD_DIM)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias) * sees_a_key
            heads.append(y.transpose(1, 2).flatten(2))
        return torch.cat(heads, dim=-1)


def tables(options: Options) -> list[Table]:
    """Every kind of attention at every length."""
    lengths = (64, 128) if options.quick else (512, 2048, 8192, 32_768)[: 4 if options.on_gpu else 3]
    rows = [
        Row((kind, str(length), precision), partial(work, kind, length, precision, options), f"{length}, {precision}")
        for precision in options.precisions
        for length in lengths
        for kind in KINDS
    ]
    windows = ", ".join(f"{group.factor}x={group.near}:{group.far}" for group in GROUPS)
    how_many = f"as many rows as make {TOKENS:,} tokens" if options.on_gpu else "one row"
    about = (
        f"Forward and backward of the attention alone: windows {windows}, {HEADS} heads of {HEAD_DIM}, {how_many}, "
        "without dropout; flash attention is torch's, causal, of as many heads to all keys."
    )
    columns = {TIME: "us a token", "kept": "kept for backward, bytes a token", "peak": "peak, GB"}
    ratios = {
        "to flash attention": lambda settings: to(settings, model=FLASH),
        "to dense masks": lambda settings: to(settings, model=MASKS),
    }
    settings = ["attention", "T", "precision"]
    return [Table("retina", "Retina attention", about, settings, columns, rows, 1e6, ratios, parity)]


def work(kind: str, length: int, precision: str, options: Options) -> Work:
    """Time and memory of one kind of attention."""
    rows = TOKENS // length if options.on_gpu and not options.quick else 1
    inputs = Inputs(length, rows, options.device, DTYPES[precision])
    forward = inputs.forward(kind)

    def run() -> None:
        inputs.gradients(kind, forward)

    def others() -> Mapping[str, Cell]:
        return {"kept": saved_bytes(forward) / (rows * length), "peak": peak(run, options) / GB}

    return Work(run, rows * length, others)


def parity() -> str:
    """Windows against dense masks, output and gradients, at lengths below and beyond the windows."""
    names = ["output", "gradient of the fine projection", *(f"gradient of {group.factor}x" for group in GROUPS[1:])]
    worst = 0.0
    for length in (128, 512, 2048):
        inputs = Inputs(length)
        expected = inputs.gradients(MASKS, inputs.forward(MASKS))
        pairs = zip(names, inputs.gradients(WINDOWS, inputs.forward(WINDOWS)), expected, strict=True)
        worst = max(worst, *(assert_parity(f"T={length}: {name}", a, b, TOLERANCE) for name, a, b in pairs))
    return f"windows and dense masks agree on output and all gradients to {worst:.1e}"
