"""Attention through a window over blocks of tokens, forward and backward, at a cost linear in the number of tokens.

The keys of a scale k are blocks of k tokens. Block j is visible at query t iff it is finished and its first token lies
in the window, near <= t - j k < far (Multi-scale Transformer LMs, Section 3.4, Figure 1e). Where near and far are
multiples of k, all k queries of a row see the same blocks: after the first ``near`` queries, which see none, row r
sees the blocks r - w + 1 .. r, with w = (far - near) / k. A window over blocks is a causal window over rows, whose k
queries share what they see::

    k = 2, window 2:6 (w = 2)      blocks    0 1 2 3
        t = 0, 1                             . . . .      zero
        t = 2, 3                   row 0     x . . .
        t = 4, 5                   row 1     x x . .
        t = 6, 7                   row 2     . x x .

On a GPU, in half precision, torch's flash kernels compute just that (``flash_windows``); elsewhere, blocks of queries
are taken against the keys that they see (``window_blocks``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fairseq_ms.core.ops.attention import Attended, zeros_like
from fairseq_ms.core.ops.flash_windows import precision
from fairseq_ms.core.ops.plain import plain
from fairseq_ms.core.ops.recompute import DropoutMasks, check_probability
from fairseq_ms.core.ops.window_blocks import Heads, Window
from fairseq_ms.core.scales import Scale, check_window


class LayerWindows:
    """All windows of a layer, on its projections.

    These are ``fine``, (B, T, D + 2 * N * H), queries of all windows beside keys and values of those at 1x; and of
    every other factor k keys beside values, (B, T // k, 2 * N * H).

    Args:
        scales: the windows with their heads, those of one factor side by side, 1x first
        head_dim: H
        dropout: probability of dropping an attention weight
        sinks_N: of all heads in this order, as in ``attention.attend``
    """

    def __init__(
        self, scales: Sequence[Scale], head_dim: int, dropout: float = 0.0, sinks_N: Tensor | None = None
    ) -> None:
        self.scales, self.head_dim, self.dropout, self.sinks_N = scales, head_dim, dropout, sinks_N
        self.masks: DropoutMasks | None = None
        # By factor, the heads of its windows.
        factors = dict.fromkeys(scale.factor for scale in scales)
        self.counts = [[scale.heads for scale in scales if scale.factor == factor] for factor in factors]

    def heads(self, fine: Tensor, *coarse: Tensor) -> list[Heads]:
        """By window, views of its queries, keys and values."""
        width = self.head_dim * sum(scale.heads for scale in self.scales)
        found: list[Tensor] = []
        for pair, counts in zip([fine[..., width:], *coarse], self.counts):
            # (B, C, 2 * N * H) -> by window of the factor, (2, B, N, C, H)
            both = pair.unflatten(-1, (2, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
            found += both.split(counts, dim=2)
        return [(q, k, v) for q, (k, v) in zip(self.split(fine[..., :width]), found)]

    def split(self, x_BTD: Tensor) -> Sequence[Tensor]:
        """(B, T, D) -> by window, (B, N, T, H)."""
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split([s.heads for s in self.scales], dim=1)

    def forward(self, *inputs: Tensor) -> Tensor:
        """What all heads see, (B, T, D)."""
        # Here, since torch's own attention draws masks of its own.
        self.masks = DropoutMasks(self.dropout) if self.dropout > 0.0 else None
        heads = self.heads(*inputs)
        rows, length = heads[0][0].size(0), heads[0][0].size(2)
        out_BTD = inputs[0].new_empty(rows, length, self.head_dim * sum(scale.heads for scale in self.scales))
        for window, own, out in zip(self.windows(length), heads, self.split(out_BTD)):
            window.forward(own, out)
        return out_BTD

    def backward(
        self, grad_BTD: Tensor, *inputs: Tensor, again: bool = True
    ) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
        """The result once more, if asked for, and the gradients of the inputs and sinks given that of the result."""
        out_BTD, grads = torch.empty_like(grad_BTD) if again else None, [torch.empty_like(x) for x in inputs]
        grad_sinks_N, windows = zeros_like(self.sinks_N), self.windows(grad_BTD.size(1))
        outs = self.split(out_BTD) if out_BTD is not None else [None] * len(windows)
        each = self.split(grad_BTD), self.heads(*inputs), self.heads(*grads), outs, self.by_window(grad_sinks_N)
        for window, grad, own, into, out, grad_sinks in zip(windows, *each):
            window.backward(grad, own, into, out, grad_sinks)
        return out_BTD, grads, grad_sinks_N

    def by_autograd(self, *inputs: Tensor, flash: torch.dtype | None = None) -> Tensor:
        """The same as ``forward``, by torch's own attention, whose gradients are autograd's."""
        heads = self.heads(*inputs)
        windows = zip(self.windows(heads[0][0].size(2)), heads)
        return torch.cat([window.by_autograd(own, self.dropout, flash) for window, own in windows], 2).flatten(2)

    def windows(self, length: int) -> list[Window]:
        """Those over T tokens."""
        own = zip(self.scales, self.by_window(self.sinks_N))
        return [Window(scale, length, self.masks, place, sinks) for place, (scale, sinks) in enumerate(own)]

    def by_window(self, sinks_N: Tensor | None) -> Sequence[Tensor | None]:
        """Those of each one's heads."""
        counts = [scale.heads for scale in self.scales]
        return [None] * len(counts) if sinks_N is None else sinks_N.split(counts)


class _OneWindow(LayerWindows):
    """A window, on queries, keys and values by head."""

    def heads(self, q: Tensor, *keys: Tensor) -> list[Heads]:
        k, v = keys
        return [(q, k, v)]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, factor: int = 1, near: int = 0, far: int | None = None, dropout: float = 0.0
) -> Tensor:
    """What queries see of blocks of ``factor`` tokens through the window near:far, (B, N, T, H); zero where nothing.

    Softmax attention of query t to the blocks j with near <= t - j * factor < far, from the beginning of texts, at a
    cost that grows with T and the width of the window. ``naive.window_attention`` says it in a few lines.

    Args:
        q: (B, N, T, H)
        k: of the whole blocks of the T tokens, (B, N, T // factor, H)
        v: of the same
        factor: tokens of a block
        near: in tokens, a multiple of ``factor``, and at least that for blocks, since the newest is unfinished
        far: in tokens, a multiple of ``factor``; None sees everything
        dropout: probability of dropping an attention weight

    Raises ValueError for other numbers and other shapes.
    """
    if not isinstance(factor, int) or factor < 1:
        raise ValueError(f"factor must be a whole number of at least 1: got {factor}")
    check_probability("dropout", dropout)
    check_window(Scale(factor, near=near, far=far), "near and far")
    wanted = (*q.shape[:2], q.size(2) // factor, q.size(3)) if q.dim() == 4 else None
    if wanted is None or k.shape != wanted or v.shape != wanted:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q must be (B, N, T, H), k and v (B, N, T // {factor}, H): got {shapes}")
    windows = _OneWindow([Scale(factor, near=near, far=far, heads=q.size(1))], q.size(3), dropout)
    return windows.split(window_attention_linear(windows, (q, k, v)))[0]


def window_attention_linear(
    windows: LayerWindows, inputs: Sequence[Tensor], out: nn.Linear | None = None, recompute: bool = True
) -> Tensor:
    """Attention through all windows of a layer, and the projection after it, if any: (B, T, D) -> (B, T, D).

    Its naive twin is ``naive.window_attention`` of every window's heads. Here alone it is decided who computes it:
    flash kernels where they run, else blocks of queries. Those have a backward of their own on a CPU, for which, with
    ``recompute``, the inputs alone are kept.
    """
    flash = precision(inputs[0], windows.head_dim)
    on_cpu = inputs[0].device.type == "cpu" and not torch.compiler.is_compiling()
    if flash is not None or not (recompute and on_cpu):
        attended = windows.by_autograd(*inputs, flash=flash)
    elif out is not None and torch.is_grad_enabled() and plain(out):
        return Attended.apply(windows, out.weight, out.bias, windows.sinks_N, *inputs)
    else:
        attended = Attended.apply(windows, None, None, windows.sinks_N, *inputs)
    return attended if out is None else out(attended)
