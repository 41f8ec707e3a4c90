"""Windows by themselves, against dense flash attention, dense masks and flex attention, from short to long texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.device import peak
from benchmarks.table import DTYPES, GB, TIME, Cell, Options, Row, Table, Work, assert_parity, to
from fairseq_ms.core import Scale, window_attention
from fairseq_ms.tools.saved_bytes import saved_bytes

HEAD_DIM = 64
SCALES = [Scale(1, near=0, far=8), Scale(4, near=8, far=256), Scale(16, near=256, far=512)]
# Of every scale, and of all.
EACH, HEADS = 4, 12
FLASH, MASKS, WINDOWS, FLEX = KINDS = ("dense flash attention", "dense masks", "windows", "flex attention")
# As many tokens at every length, on a GPU.
TOKENS = 32_768
# Queries and keys of unit variance, up to 512 of them in a softmax; gradients are sums of up to 71 products.
TOLERANCE = 2e-5


@dataclass
class Inputs:
    """Queries, keys and values (B, N, T, H) as layers have them, the heads of a position side by side: of every scale,
    and of as many heads as all of them."""

    length: int
    rows: int = 1
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.scales = [self.of_scale(scale.factor, EACH) for scale in SCALES]
        self.whole = self.of_scale(1, HEADS)
        # Nobody has to join what scales give, or to split its gradient.
        self.grads = [self.heads(self.length, EACH).detach() for _ in SCALES]
        self.whole_grad = self.heads(self.length, HEADS).detach()

    def of_scale(self, factor: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        blocks = self.length // factor
        return self.heads(self.length, heads), self.heads(blocks, heads), self.heads(blocks, heads)

    def heads(self, length: int, heads: int) -> Tensor:
        x = torch.randn(self.rows, length, heads, HEAD_DIM, device=torch.device(self.device), dtype=self.dtype)
        return x.transpose(1, 2).requires_grad_()

    def forward(self, kind: str) -> Callable[[], list[Tensor]]:
        """Attention of one kind, (B, N, T, H): of every scale, or of all heads."""
        if kind == FLASH:
            q, k, v = self.whole
            return lambda: [F.scaled_dot_product_attention(q, k, v, is_causal=True)]
        if kind in (MASKS, FLEX):
            return dense(self) if kind == MASKS else flex(self)
        parts = list(zip(self.scales, SCALES))
        return lambda: [window_attention(*own, s.factor, s.near, s.far) for own, s in parts]

    def gradients(self, kind: str, forward: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The outputs and the gradients of queries, keys and values."""
        outputs, flash = forward(), kind == FLASH
        wanted = self.whole if flash else [x for heads in self.scales for x in heads]
        grads = torch.autograd.grad(outputs, wanted, [self.whole_grad] if flash else self.grads)
        return [*(output.detach() for output in outputs), *grads]


def dense(inputs: Inputs) -> Callable[[], list[Tensor]]:
    """The same attention by ``scaled_dot_product_attention`` over all keys of a scale, with masks built once."""
    parts, like = [], inputs.whole_grad
    positions = torch.arange(inputs.length, device=like.device)
    for own, scale in zip(inputs.scales, SCALES):
        visible = scale.visible(positions[:, None], positions[: inputs.length // scale.factor])
        sees_a_key = visible.any(-1, keepdim=True)
        bias = like.new_zeros(visible.shape).masked_fill_(~(visible | ~sees_a_key), -torch.inf)
        parts.append((partial(F.scaled_dot_product_attention, *own, attn_mask=bias), sees_a_key.to(like.dtype)))
    return lambda: [attend() * sees_a_key for attend, sees_a_key in parts]


def flex(inputs: Inputs) -> Callable[[], list[Tensor]]:
    """The same attention by torch's ``flex_attention``, with masks of blocks built once; compiled on a GPU."""
    attention: Callable[..., Tensor] = flex_attention
    if inputs.whole_grad.is_cuda:
        # Every scale and length is compiled for itself, and torch remembers few.
        torch.compiler.reset()
        attention = torch.compile(flex_attention, dynamic=False)
    parts = []
    for own, scale in zip(inputs.scales, SCALES):
        sizes = inputs.length, inputs.length // scale.factor, inputs.device
        mask = create_block_mask(lambda row, head, t, j, see=scale.visible: see(t, j), None, None, *sizes)
        parts.append(partial(attention, *own, block_mask=mask))
    return lambda: [attend() for attend in parts]


def tables(options: Options) -> list[Table]:
    """Every kind of attention at every length."""
    lengths = (64, 128) if options.quick else (512, 2048, 8192, 32_768)[: 4 if options.on_gpu else 3]
    rows = [
        Row((kind, str(length), precision), partial(work, kind, length, precision, options), f"{length}, {precision}")
        for precision in options.precisions
        for length in lengths
        for kind in (KINDS if options.on_gpu else KINDS[:-1])
    ]
    windows = ", ".join(scale.window for scale in SCALES)
    how_many = f"as many rows as make {TOKENS:,} tokens" if options.on_gpu else "one row"
    about = (
        f"Forward and backward of the attention alone: windows {windows}, {HEADS} heads of {HEAD_DIM}, {how_many}, "
        "without dropout; flash attention is torch's, causal, of as many heads to all keys."
    )
    columns = {TIME: "us a token", "kept": "kept for backward, bytes a token", "peak": "peak, GB"}
    ratios = {"to flash attention": partial(to, model=FLASH), "to dense masks": partial(to, model=MASKS)}
    settings = ["attention", "T", "precision"]
    return [Table("retina", "Retina attention", about, settings, columns, rows, 1e6, ratios, parity)]


def work(kind: str, length: int, precision: str, options: Options) -> Work:
    """Time and memory of one kind of attention."""
    rows = TOKENS // length if options.on_gpu and not options.quick else 1
    inputs = Inputs(length, rows, options.device, DTYPES[precision])
    forward = inputs.forward(kind)
    run = partial(inputs.gradients, kind, forward)

    def others() -> Mapping[str, Cell]:
        return {"kept": saved_bytes(forward) / (rows * length), "peak": peak(run, options) / GB}

    return Work(run, rows * length, others)


def parity() -> str:
    """Windows against dense masks, output and gradients, at lengths below and beyond the windows."""
    names = [f"output at {scale}" for scale in SCALES]
    names += [f"gradient of {name} at {scale}" for scale in SCALES for name in "qkv"]
    worst = 0.0
    for length in (128, 512, 2048):
        inputs = Inputs(length)
        expected = inputs.gradients(MASKS, inputs.forward(MASKS))
        pairs = zip(names, inputs.gradients(WINDOWS, inputs.forward(WINDOWS)), expected, strict=True)
        worst = max(worst, *(assert_parity(f"T={length}: {name}", a, b, TOLERANCE) for name, a, b in pairs))
    return f"windows and dense masks agree on output and all gradients to {worst:.1e}"
