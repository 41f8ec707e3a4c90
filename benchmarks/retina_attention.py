"""Attention through the retina's windows against the same heads with dense masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from benchmarks.runner import Contestant, Options, Section, assert_parity
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.core.ops.window_attention import HeadGroup, Layouts, WindowAttention

NAME = "retina-attention"
HELP = "attention through windows, forward and backward, against dense masks; bytes kept; growth with length"

HEAD_DIM = 64
GROUPS = [HeadGroup(1, 0, 8, 4), HeadGroup(4, 8, 256, 4), HeadGroup(16, 256, 512, 4)]
# Goals for time, and for the bytes kept, relative to dense masks.
TIME_GOALS = {512: 0.65, 2048: 0.25, 8192: 0.06}
BYTES_GOALS = {8192: 0.14}
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
        dim = HEAD_DIM * sum(group.heads for group in GROUPS)
        shapes = [(self.rows, self.length, dim + 2 * width)]
        shapes += [(self.rows, self.length // group.factor, 2 * HEAD_DIM * group.heads) for group in GROUPS[1:]]
        device, dtype = torch.device(self.device), self.dtype
        self.tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        self.grad = torch.randn(self.rows, self.length, dim, device=device, dtype=dtype)
        layouts = Layouts(GROUPS, self.length, device)
        self.windows = WindowAttention(layouts, HEAD_DIM, 0.0)

    def sparse(self) -> Tensor:
        """What ``retina_lm`` computes in training."""
        return _Windows.apply(self.windows, *self.tensors)

    def gradients(self, forward: Callable[[], Tensor]) -> list[Tensor]:
        """The output and the gradients of the projections."""
        output = forward()
        return [output.detach(), *torch.autograd.grad(output, self.tensors, self.grad)]


class _Windows(torch.autograd.Function):
    """``WindowAttention`` without the projection behind it."""

    @staticmethod
    def forward(ctx, windows: WindowAttention, *inputs: Tensor) -> Tensor:
        ctx.windows = windows
        ctx.save_for_backward(*inputs)
        return windows.forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
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


def _parity(inputs: Inputs, dense: Dense) -> str:
    names = ["output", "gradient of the fine projection", *(f"gradient of {group.factor}x" for group in GROUPS[1:])]
    pairs = zip(names, inputs.gradients(inputs.sparse), inputs.gradients(dense), strict=True)
    worst = max(assert_parity(name, one, other, TOLERANCE) for name, one, other in pairs)
    return f"windows and dense masks agree on output and gradients to {worst:.1e}"


def sections(options: Options) -> Iterable[Section]:
    """Time and bytes at every length, then the growth of both with the length."""
    windows = ", ".join(f"{group.factor}x={group.near}:{group.far}" for group in GROUPS)
    shape = f"{windows}, {sum(group.heads for group in GROUPS)} heads of {HEAD_DIM}, batch 1, float32, no dropout"
    lengths = (128, 256, 320) if options.quick else (512, 2048, 8192)
    for length in lengths:
        inputs = Inputs(length)
        dense = Dense(inputs)

        def parity(inputs: Inputs = inputs, dense: Dense = dense) -> str:
            return _parity(inputs, dense)

        yield Section(
            f"retina attention, forward and backward, T={length}, {shape}",
            "ms",
            [
                Contestant("dense masks", lambda i=inputs, d=dense: i.gradients(d) and None),
                Contestant("windows", lambda i=inputs: i.gradients(i.sparse) and None, TIME_GOALS.get(length)),
            ],
            "dense masks",
            parity,
            scale=1e3,
        )
        yield Section(
            f"bytes kept for backward, T={length}",
            "bytes a token",
            [
                Contestant("dense masks", lambda d=dense, n=length: saved_bytes(d) / n),
                Contestant("windows", lambda i=inputs: saved_bytes(i.sparse) / i.length, BYTES_GOALS.get(length)),
            ],
            "dense masks",
            parity,
            measure="value",
        )
    yield from _growth(lengths, options)


def _growth(lengths: tuple[int, ...], options: Options) -> Iterable[Section]:
    """Time and bytes a token at every length relative to the shortest; each length is compared with dense above."""
    everything = {length: Inputs(length) for length in lengths}

    def parity() -> str:
        return "; ".join(f"T={n}: {_parity(inputs, Dense(inputs))}" for n, inputs in everything.items())

    shortest, longest = lengths[0], lengths[-1]

    def repeated(length: int) -> None:
        # As many tokens for every length, so that each measurement takes as long.
        for _ in range(longest // length):
            everything[length].gradients(everything[length].sparse)

    yield Section(
        "time a token by length, windows",
        "us a token",
        [Contestant(f"T={n}", lambda n=n: repeated(n), 1.2 if n == longest else None) for n in lengths],
        f"T={shortest}",
        parity,
        scale=1e6 / longest,
    )
    yield Section(
        "bytes kept a token by length, windows",
        "bytes a token",
        [Contestant(f"T={n}", lambda n=n: saved_bytes(everything[n].sparse) / n, 1.001) for n in lengths],
        f"T={shortest}",
        parity,
        measure="value",
    )
