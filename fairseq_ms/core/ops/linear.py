"""Projections after a norm, a short convolution, or activation and dropout, whose results backward computes again.

They take next to no time, but half of the memory that autograd would keep of a transformer layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops.recompute import autocasted, draw_seed, drop, feed, ours, plain, remade, saves

Norm = nn.LayerNorm | nn.RMSNorm
# Called with a width and an epsilon.
NORMS: dict[str, Callable[[int, float], Norm]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def swiglu(x: Tensor) -> Tensor:
    """``silu(a) * b`` of two halves, (..., 2 * I) -> (..., I)."""
    gate, value = x.chunk(2, dim=-1)
    opened = F.silu(gate)
    with remade(opened, F.silu, gate):
        return value * opened


def relu_squared(x: Tensor) -> Tensor:
    """The square of ``relu(x)``."""
    # Not ``relu``, whose result autograd would keep.
    relu = partial(F.threshold, threshold=0.0, value=0.0)
    above = relu(x)
    with remade(above, relu, x):
        return above.square()


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
# Autograd keeps the results of these, and the inputs of the others.
OF_THEIR_RESULT = ("relu", "tanh")


def projection(inputs: int, outputs: int, bias: bool = True, rows: tuple[int, ...] = ()) -> nn.Linear:
    """An ``nn.Linear``, exactly, which quantisation and others look for.

    ``rows`` are the rows of the weight of each of several projections, such as those to queries, keys and values.
    """
    linear: Any = nn.Linear(inputs, outputs, bias)
    linear.rows = rows or (outputs,)
    return linear


class SomeSymbols(nn.Module):
    """A projection to logits (..., V), in which symbols that are ``never`` predicted have the lowest finite number."""

    def __init__(self, project: nn.Module, never: Sequence[int]) -> None:
        super().__init__()
        self.project, self.never = project, tuple(never)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x (..., D) -> logits (..., V)."""
        logits_BTV = self.project(x_BTD)
        never = torch.tensor(self.never, device=logits_BTV.device)
        # Not in place: hooks and adapters may hold what the projection gave.
        return logits_BTV.index_fill(-1, never, torch.finfo(logits_BTV.dtype).min)


def table(words: nn.Module, symbols: int, device: torch.device | None = None) -> Tensor:
    """The embeddings of all symbols, (V, D): the weight of an embedding, if it is plain."""
    if plain(words, nn.Embedding):
        return words.weight  # type: ignore[return-value]
    # Embeddings give their padding row no gradient, but here it is a symbol like any other.
    parts = words.modules() if torch.is_grad_enabled() else ()
    padded: list[Any] = [module for module in parts if getattr(module, "padding_idx", None) is not None]
    indices = [module.padding_idx for module in padded]
    try:
        for module in padded:
            module.padding_idx = None
        # As (B, T), which a module in the place of an embedding may want.
        return words(torch.arange(symbols, device=device or next(words.parameters()).device).unsqueeze(0)).squeeze(0)
    finally:
        for module, index in zip(padded, indices):
            module.padding_idx = index


class TiedOutput(nn.Module):
    """Logits by the word embedding ``embed.words``, or what stands in its place, without parameters of its own."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        # In a list, so that the embedding does not appear in the state dict a second time.
        self._embed: list[Any] = [embed]
        self.symbols = self._embed[0].words.num_embeddings

    def matrix(self, device: torch.device | None = None) -> Tensor:
        """The word embedding (V, D), computed on ``device`` where it is no plain one."""
        return table(self._embed[0].words, self.symbols, device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x (B, T, D) -> logits (B, T, V)."""
        return F.linear(x_BTD, self.matrix(x_BTD.device))


def weights_of(norm: Norm | None) -> list[Tensor]:
    """The weight (D,) and the bias of a norm, if it has them."""
    both = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return [parameter for parameter in both if parameter is not None]


def normalise(norm: Norm, x: Tensor, weight_D: Tensor | None = None, bias_D: Tensor | None = None) -> Tensor:
    """``norm(x)`` with these parameters, in the order of ``weights_of``."""
    if not isinstance(norm, nn.RMSNorm):
        return F.layer_norm(x, x.shape[-1:], weight_D, bias_D, norm.eps)
    if x.is_cpu and weight_D is not None and x.dtype == weight_D.dtype == torch.promote_types(x.dtype, torch.float32):
        # As in torch, where autograd would keep the input of the multiplication by the weight.
        of_unit_size = partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=norm.eps)
        unit = of_unit_size(x)
        with remade(unit, of_unit_size, x):
            return weight_D * unit
    return F.rms_norm(x, x.shape[-1:], weight_D, norm.eps)


class Preceding(Protocol):
    """The positions before a piece of a text, for a short convolution."""

    def convolved(self, x: Tensor, weight_ND: Tensor) -> Tensor:
        """``ShortConv`` of x (..., D), which then comes before the next piece."""


class ShortConv(nn.Module):
    """A causal depthwise convolution: adds the N positions before to each, times weights that start at zero.

    With the token before in each key, one layer finds what followed it last time. Known as token shift, smear or canon
    layers, and part of Mamba and gated delta nets.
    """

    def __init__(self, dim: int, taps: int) -> None:
        super().__init__()
        # The last row is for the position just before.
        self.weight = nn.Parameter(torch.zeros(taps, dim))

    def reset_parameters(self) -> None:
        """Set the weights to zero."""
        nn.init.zeros_(self.weight)

    def forward(self, x_BTD: Tensor, before: Preceding | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D), after zeros at the beginning of a text, else after ``before``."""
        if before is not None:
            return before.convolved(x_BTD, self.weight)
        return convolve(pad_left(x_BTD, self.weight), self.weight)


def pad_left(x_BTD: Tensor, weight_ND: Tensor) -> Tensor:
    """Put N positions of zeros in front of x, (B, T, D) -> (B, N + T, D)."""
    return F.pad(x_BTD, (0, 0, len(weight_ND), 0))


def convolve(joined: Tensor, weight_ND: Tensor) -> Tensor:
    """Add to each of the last T positions the N before it times their weights, (B, N + T, D) -> (B, T, D)."""
    taps = weight_ND.size(0)
    if weight_ND.dtype != joined.dtype:
        weight_ND = weight_ND.to(joined.dtype)
    if joined.size(1) == taps + 1:  # a decoding step, in fewer operations
        before_BND, x_B1D = joined.split((taps, 1), dim=1)
        return (before_BND * weight_ND).sum(1, keepdim=True).add_(x_B1D)
    x_BTD = joined[:, taps:]
    for first, weight_D in enumerate(weight_ND, -taps):
        x_BTD = torch.addcmul(x_BTD, joined[:, taps + first : first], weight_D)
    return x_BTD


def norm_heads(
    x_BTO: Tensor, head_dim: int, norms: Sequence[tuple[Norm, int]], recompute: bool, factors_N: Tensor | None = None
) -> Tensor:
    """Normalise the first heads of x (B, T, O) over their H channels, and leave the rest.

    With ``recompute``, only x is kept for backward.

    Args:
        norms: norms of one epsilon, and the numbers of heads that they normalise, in order
        factors_N: factors of the first N heads, after the norm
    """
    if all(plain(norm, nn.RMSNorm) for norm, _ in norms):
        gain_NH = torch.cat([norm.weight.expand(count, -1) for norm, count in norms])
        if factors_N is not None:
            gain_NH = F.pad(factors_N, (0, len(gain_NH) - len(factors_N)), value=1.0).unsqueeze(1) * gain_NH
        heads, rest = x_BTO.split([gain_NH.numel(), x_BTO.size(-1) - gain_NH.numel()], dim=-1)
        of_unit_size = partial(F.rms_norm, normalized_shape=gain_NH.shape[-1:], eps=norms[0][0].eps)
        heads = heads.unflatten(-1, gain_NH.shape)
        unit = of_unit_size(heads)
        with remade(unit, of_unit_size, heads, enabled=recompute):
            heads_BTNH = gain_NH * unit
        return torch.cat([heads_BTNH.flatten(-2).to(x_BTO.dtype), rest], dim=-1)
    widths = [count * head_dim for _, count in norms]
    *parts, rest = x_BTO.split([*widths, x_BTO.size(-1) - sum(widths)], dim=-1)
    heads = [norm(part.unflatten(-1, (n, head_dim))) for part, (norm, n) in zip(parts, norms) if n]
    if factors_N is not None:
        heads[0] = heads[0] * factors_N.unsqueeze(1)
    return torch.cat([*(part.flatten(-2).to(x_BTO.dtype) for part in heads), rest], dim=-1)


def norm_linear(
    x: Tensor,
    norm: Norm | None,
    linear: nn.Module,
    recompute: bool,
    conv: ShortConv | None = None,
    before: Preceding | None = None,
) -> tuple[Tensor, Tensor]:
    """``linear(conv(norm(x), before))``, (..., D) -> (..., O), and the input of the projection, (..., D).

    Norm and convolution may be missing. With ``recompute``, only x is kept for backward, unless the input of the
    projection is used elsewhere.
    """
    if norm is None and conv is None:
        return linear(x), x
    # A convolution after ``before`` changes it, and may run only once.
    again = recompute and (conv is None or before is None)
    if not (again and saves() and plain(norm, nn.LayerNorm, nn.RMSNorm) and plain(conv, ShortConv)):
        normed = x if norm is None else norm(x)
        normed = autocasted(normed if conv is None else conv(normed, before))
        return linear(normed), normed
    own = weights_of(norm)

    def normalised(x: Tensor, *own_D: Tensor) -> Tensor:
        return x if norm is None else normalise(norm, x, *own_D)

    if conv is None:
        return feed(linear, normalised, x, *own)

    def padded(x: Tensor, weight_ND: Tensor, *own_D: Tensor) -> Tensor:
        return pad_left(normalised(x, *own_D), weight_ND)

    def convolved(x: Tensor, weight_ND: Tensor, *own_D: Tensor) -> Tensor:
        joined = padded(x, weight_ND, *own_D)
        with remade(joined, padded, x, weight_ND, *own_D):
            return convolve(joined, weight_ND)

    return feed(linear, convolved, x, conv.weight, *own)


def activation_linear(x: Tensor, name: str, dropout: float, linear: nn.Module, recompute: bool) -> Tensor:
    """``linear(F.dropout(ACTIVATIONS[name](x), dropout))``, (..., I) -> (..., O).

    With ``recompute``, only one tensor as large as x is kept for backward.
    """
    activation = ACTIVATIONS[name]
    if not (recompute and ours()):
        return linear(F.dropout(activation(x), dropout, training=True))
    seed = draw_seed() if dropout else 0
    if name in OF_THEIR_RESULT:
        x, activation = activation(x), torch.positive

    return feed(linear, lambda x: drop(activation(x), dropout, seed), x)[0]
