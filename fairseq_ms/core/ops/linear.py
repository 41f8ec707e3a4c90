"""Linear layers, and what is cheap in front of them: a norm, a short convolution, activation, dropout.

Norms, activation and dropout produce half of the tensors that autograd keeps of a transformer layer, and take next
to no time. Here their results are computed again in the backward pass from inputs that are kept anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_ms.core.ops.plain import ours, plain, table
from fairseq_ms.core.ops.recompute import drop, recomputed, saves

Norm = nn.LayerNorm | nn.RMSNorm
# Of a width and an epsilon.
NORMS: dict[str, Callable[[int, float], Norm]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def swiglu(x: Tensor) -> Tensor:
    """``silu(a) * b`` of the two halves, (..., 2 * I) -> (..., I)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def relu_squared(x: Tensor) -> Tensor:
    """The square of ``relu(x)``."""
    return F.relu(x).square()


# No lambdas, so that modules that hold one can be pickled.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_squared": relu_squared,
    "gelu": F.gelu,
    "gelu_accurate": partial(F.gelu, approximate="tanh"),
    "swish": F.silu,
    "swiglu": swiglu,
    "tanh": torch.tanh,
    "linear": torch.positive,
}


def projection(inputs: int, outputs: int, bias: bool = True, rows: tuple[int, ...] = ()) -> nn.Linear:
    """An ``nn.Linear``, of that very type, which quantisation and others look for.

    Args:
        rows: of the weight, how many each projection has, where several share one: queries, keys and values, a gate and
            what it opens
    """
    linear: Any = nn.Linear(inputs, outputs, bias)
    linear.rows = rows or (outputs,)
    return linear


class SomeSymbols(nn.Module):
    """Logits of a projection, but that some symbols are never predicted: theirs are as small as numbers go.

    Args:
        project: to logits (..., V)
        never: numbers of those symbols
    """

    def __init__(self, project: nn.Module, never: Sequence[int]) -> None:
        super().__init__()
        self.project, self.never = project, tuple(never)

    @property
    def weight(self) -> Tensor:
        """That of the projection (V, D)."""
        return self.project.weight  # type: ignore[return-value]

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x (..., D) -> logits (..., V)."""
        logits_BTV = self.project(x_BTD)
        for symbol in self.never:
            logits_BTV[..., symbol].fill_(torch.finfo(logits_BTV.dtype).min)
        return logits_BTV


@ours
class TiedOutput(nn.Module):
    """Logits by the transposed word embedding; owns no parameter.

    Args:
        embed: whose ``words`` is the embedding, or what stands in its place
    """

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        # In a list, so that the embedding does not appear in the state dict a second time.
        self._embed: list[Any] = [embed]
        self.symbols = self._embed[0].words.num_embeddings

    @property
    def weight(self) -> Tensor:
        """The word embedding (V, D)."""
        return table(self._embed[0].words, self.symbols, despite_hooks=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x (B, T, D) -> logits (B, T, V)."""
        return F.linear(x_BTD, table(self._embed[0].words, self.symbols, x_BTD.device, despite_hooks=True))


def own_of(norm: Norm) -> list[Tensor]:
    """The weight (D,) of a norm and its bias, if it is of a kind that has one."""
    return [norm.weight] if isinstance(norm, nn.RMSNorm) else [norm.weight, norm.bias]


def normalise(norm: Norm, x: Tensor, weight_D: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """``norm(x)`` with other parameters, in the order of ``own_of``."""
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x, x.shape[-1:], weight_D, norm.eps)
    return F.layer_norm(x, x.shape[-1:], weight_D, bias_D, norm.eps)


class Before(Protocol):
    """What knows the positions before those it is shown, where these are not texts from their beginning."""

    def add(self, x: Tensor, weight_ND: Tensor) -> Tensor:
        """x (..., D) as ``add_before`` has it; a state moves on."""


@ours
class ShortConv(nn.Module):
    """Adds to every position the N before it, each times a weight a channel: a causal depthwise convolution, from zero.

    With the token before in every key, one layer finds what followed last time (known as token shift, smear or canon
    layers; Mamba and gated delta nets have it).

    Args:
        dim: D
        taps: N
    """

    def __init__(self, dim: int, taps: int) -> None:
        super().__init__()
        # The last row is that of the position just before.
        self.weight = nn.Parameter(torch.zeros(taps, dim))

    def reset_parameters(self) -> None:
        """Add nothing."""
        nn.init.zeros_(self.weight)

    def forward(self, x_BTD: Tensor, before: Before | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D); before a text there are zeros, and ``before`` knows what is before a piece."""
        if before is not None:
            return before.add(x_BTD, self.weight)
        return add_before(after_zeros(x_BTD, self.weight), self.weight)


def after_zeros(x_BTD: Tensor, weight_ND: Tensor) -> Tensor:
    """(B, N + T, D): N positions of zeros, which are before a text, and x."""
    return F.pad(x_BTD, (0, 0, len(weight_ND), 0))


def add_before(joined: Tensor, weight_ND: Tensor) -> Tensor:
    """Of positions (B, N + T, D) the last T, each plus the N before it times their weights; (B, T, D)."""
    taps = weight_ND.size(0)
    if weight_ND.dtype != joined.dtype:
        weight_ND = weight_ND.to(joined.dtype)
    if joined.size(1) == taps + 1:  # a step, which is to cost little
        before_BND, x_B1D = joined.split((taps, 1), dim=1)
        return (before_BND * weight_ND).sum(1, keepdim=True).add_(x_B1D)
    x_BTD = joined[:, taps:]
    for first, weight_D in enumerate(weight_ND, -taps):
        x_BTD = torch.addcmul(x_BTD, joined[:, taps + first : first], weight_D)
    return x_BTD


def norm_heads(
    x_BTO: Tensor, head_dim: int, norms: Sequence[tuple[Norm, int]], recompute: bool, factors_N: Tensor | None = None
) -> Tensor:
    """x (B, T, O), whose first heads pass through these norms over H, so many through each; the rest stays as it is.

    The first of them are multiplied by ``factors``. With ``recompute``, only x is kept for backward.
    """
    if plain(*(norm for norm, _ in norms)):
        gain_NH = torch.cat([norm.weight.expand(count, -1) for norm, count in norms])
        if factors_N is not None:
            gain_NH = F.pad(factors_N, (0, len(gain_NH) - len(factors_N)), value=1.0).unsqueeze(1) * gain_NH
        normalised = partial(_normalised_heads, eps=norms[0][0].eps)
        return recomputed(normalised, x_BTO, gain_NH, enabled=recompute)
    widths = [count * head_dim for _, count in norms]
    *parts, rest = x_BTO.split([*widths, x_BTO.size(-1) - sum(widths)], dim=-1)
    heads = [norm(part.unflatten(-1, (n, head_dim))) for part, (norm, n) in zip(parts, norms) if n]
    if factors_N is not None:
        heads[0] = heads[0] * factors_N.unsqueeze(1)
    return torch.cat([*(part.flatten(-2).to(x_BTO.dtype) for part in heads), rest], dim=-1)


def _normalised_heads(x_BTO: Tensor, gain_NH: Tensor, eps: float | None) -> Tensor:
    """x (B, T, O) whose first N heads have a mean square of 1, times their gains."""
    heads, rest = x_BTO.split([gain_NH.numel(), x_BTO.size(-1) - gain_NH.numel()], dim=-1)
    heads_BTNH = F.rms_norm(heads.unflatten(-1, gain_NH.shape), gain_NH.shape[-1:], eps=eps) * gain_NH
    return torch.cat([heads_BTNH.flatten(-2).to(x_BTO.dtype), rest], dim=-1)


def norm_linear(
    x: Tensor,
    norm: Norm | None,
    linear: nn.Linear,
    recompute: bool,
    conv: ShortConv | None = None,
    before: Before | None = None,
) -> tuple[Tensor, Tensor]:
    """``linear(conv(norm(x), before))``, its naive twin, (..., D) -> (..., O), and what the projection reads, (..., D).

    Norm and convolution may be missing. With ``recompute``, x is all that is kept for backward, and what the projection
    reads if that is used.
    """
    if norm is None and conv is None:
        return linear(x), x
    again = recompute and saves() and plain(norm, conv, linear)
    # Only pieces of texts and chunks have something before them.
    if not again or (conv is not None and before is not None):
        normed = x if norm is None else norm(x)
        if conv is not None:
            normed = conv(normed, before)
        return linear(normed), normed
    own = [] if norm is None else own_of(norm)
    own += [] if conv is None else [conv.weight]
    return _NormLinear.apply(norm, conv is not None, x, linear.weight, linear.bias, *own)


def _prepared(norm: Norm | None, mixed: bool, x: Tensor, *own: Tensor) -> Tensor:
    """``conv(norm(x))`` with other parameters, or without the one or the other."""
    own_D, taps = (own[:-1], own[-1:]) if mixed else (own, ())
    normed = x if norm is None else normalise(norm, x, *own_D)
    for weight_ND in taps:
        normed = add_before(after_zeros(normed, weight_ND), weight_ND)
    return normed


def activation_linear(x: Tensor, name: str, dropout: float, linear: nn.Linear, recompute: bool) -> Tensor:
    """``linear(F.dropout(ACTIVATIONS[name](x), dropout))``, its naive twin; x (..., I) -> (..., O).

    With ``recompute``, x is all that is kept: activation and dropout are computed again in backward.
    """
    if recompute and saves() and plain(linear):
        return _ActivationLinear.apply(name, dropout, x, linear.weight, linear.bias)
    return linear(F.dropout(ACTIVATIONS[name](x), dropout, training=True))


class _NormLinear(torch.autograd.Function):
    """A norm, a short convolution and a projection, with what it reads as a second result, which may stay unused."""

    @staticmethod
    def forward(ctx, norm: Norm | None, mixed: bool, x: Tensor, weight_OD, bias_O, *own: Tensor):
        ctx.set_materialize_grads(False)
        normed = _prepared(norm, mixed, x, *own)
        ctx.norm, ctx.mixed, ctx.has_bias, ctx.dtype = norm, mixed, bias_O is not None, normed.dtype
        ctx.save_for_backward(weight_OD, x, *own)
        return F.linear(normed, weight_OD, bias_O), normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_elsewhere: Tensor | None):
        weight_OD, *inputs = ctx.saved_tensors
        used = [] if grad is None else [grad @ weight_OD.to(grad.dtype)]
        grad_normed, *more = used + ([] if grad_elsewhere is None else [grad_elsewhere])
        grad_normed = grad_normed + more[0] if more else grad_normed
        with torch.enable_grad():
            x, *own = inputs = [tensor.detach().requires_grad_() for tensor in inputs]
            # In the types of the forward pass, where autocast may have chosen a wider one than x has.
            wide = torch.promote_types(ctx.dtype, own[0].dtype)
            normed = _prepared(ctx.norm, ctx.mixed, x.to(ctx.dtype), *(parameter.to(wide) for parameter in own))
        grad_x, *grads = torch.autograd.grad(normed, inputs, grad_normed.to(normed.dtype))
        of_linear = (None, None) if grad is None else weight_gradients(grad, normed.detach(), ctx.has_bias)
        return None, None, grad_x, *of_linear, *grads


class _ActivationLinear(torch.autograd.Function):
    """Activation, dropout and projection."""

    @staticmethod
    def forward(ctx, name: str, dropout: float, x: Tensor, weight_OI, bias_O):
        ctx.name, ctx.has_bias = name, bias_O is not None
        ctx.save_for_backward(x, weight_OI)
        hidden, ctx.masks = ACTIVATIONS[name](x), None
        if dropout > 0.0:
            hidden, ctx.masks = drop(hidden, dropout)
        return F.linear(hidden, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight_OI = ctx.saved_tensors
        # Overwritten below; nothing else reads it.
        grad_hidden = (grad @ weight_OI.to(grad.dtype)).to(x.dtype)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            activated = ACTIVATIONS[ctx.name](leaf)
        hidden = activated.detach()
        if ctx.masks is not None:
            mask = ctx.masks.scaled(hidden)
            grad_hidden.mul_(mask)
            hidden = mask.mul_(hidden)
        (grad_x,) = torch.autograd.grad(activated, leaf, grad_hidden)
        return None, None, grad_x, *weight_gradients(grad, hidden, ctx.has_bias)


def weight_gradients(grad: Tensor, hidden: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight (O, I) and bias (O,) of a projection, from those of its results and its inputs."""
    rows_grad = grad.reshape(-1, grad.size(-1))
    rows_hidden = hidden.reshape(-1, hidden.size(-1)).to(grad.dtype)
    return rows_grad.t() @ rows_hidden, rows_grad.sum(0) if has_bias else None
