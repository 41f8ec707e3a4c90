"""Attention through any windows by dense masks: each kind is tried here before it gets a place in the core, or none.

Naive on purpose. A group of heads is one softmax over what all its windows show; far blocks may be pooled by a learned
gate, share a softmax with tokens, and go without rotation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.layers import QueryKey, TypedList
from fairseq_ms.core.ops.attention import merge_heads, split_heads
from fairseq_ms.core.ops.linear import projection
from fairseq_ms.core.scales import Scale, check_window
from fairseq_ms.lm.scales import window_scales

# Windows as narrow as this do what a short convolution does, and stay so where others grow with the text.
NARROW = 8


class Group(NamedTuple):
    """So many heads, with one softmax over what these windows show."""

    heads: int
    windows: tuple[Scale, ...]


def parse(text: str, heads: int, stretch: int = 1) -> list[list[Group]]:
    """The groups of each layer in turn, as ``--scale-windows`` has them and with + between windows of one softmax:
    ``1x=0:8*2,1x=0:96+16x=96:*6|1x=0:`` are two kinds of layers.

    Bounds above ``NARROW`` are multiplied by ``stretch``. Raises ValueError for what is no window, and for heads that
    do not add up.
    """
    layers = []
    for layer in text.split("|"):
        parts = [part.partition("*") for part in layer.split(",")]
        groups = [
            Group(int(own or heads), tuple(_window(n, stretch) for n in names.split("+"))) for names, _, own in parts
        ]
        if sum(group.heads for group in groups) != heads:
            raise ValueError(f"the heads of all groups must add up to {heads}: got {layer}")
        layers.append(groups)
    return layers


def _window(text: str, stretch: int) -> Scale:
    ((scale,),) = window_scales(text)
    check_window(scale, "windows")
    bounds = {"near": scale.near, "far": scale.far}
    return replace(scale, **{name: bound * stretch for name, bound in bounds.items() if bound and bound > NARROW})


def keys_a_head(layers: Sequence[Sequence[Group]], length: int) -> float:
    """Positions that a head remembers of a text of T tokens, heads and layers averaged."""
    every = [(group.heads, window) for groups in layers for group in groups for window in group.windows]
    keys = sum(heads * ((min(w.far or length, length) - w.near) // w.factor) for heads, w in every)
    return keys / sum(group.heads for groups in layers for group in groups)


@lru_cache(maxsize=64)
def mask_of(windows: tuple[Scale, ...], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What T queries see of all windows' keys side by side, (T, S), and who sees anything, (T, 1).

    A query that sees nothing attends to everything, so that no softmax is empty, and its result is to be zeroed.
    """
    places = torch.arange(length, device=device)
    visible = torch.cat([w.visible(places[:, None], places[: length // w.factor]) for w in windows], dim=1)
    sees = visible.any(-1, keepdim=True)
    return visible | ~sees, sees


class Heads(nn.Module):
    """A group of heads, for whole texts.

    Blocks are pooled by their mean and projected, or, with ``gate``, projected and pooled by a softmax over the block
    for each channel, of a projection and a bias for each place, as DeepSeek-V4's compressor does. Several windows share
    a softmax, each with a learned level for every head. Keys of blocks are rotated only if ``turned``.
    """

    def __init__(self, config: LayerConfig, group: Group, gate: bool, turned: bool) -> None:
        super().__init__()
        self.config, self.group, self.turned = config, group, turned
        rows = 2 * (group.heads * config.width_of_head,)
        self.pairs: TypedList[nn.Linear] = TypedList(
            projection(config.dim, sum(rows), config.bias, rows) for _ in group.windows
        )
        coarse = {str(place): w.factor for place, w in enumerate(group.windows) if gate and w.factor > 1}
        self.gates = nn.ModuleDict({place: projection(config.dim, sum(rows), False, rows) for place in coarse})
        self.places = nn.ParameterDict({place: torch.zeros(k, sum(rows)) for place, k in coarse.items()})
        count = len(group.windows)
        self.levels = nn.Parameter(torch.zeros(group.heads, count)) if count > 1 else None

    def keys_and_values(self, x_BTD: Tensor, index: int) -> Tensor:
        """Keys beside values at a window's scale, (B, T // k, 2 * N * H)."""
        factor, place = self.group.windows[index].factor, str(index)
        count = x_BTD.size(1) // factor
        blocks_BCkD = x_BTD[:, : count * factor].unflatten(1, (count, factor))
        if place not in self.gates:
            return self.pairs[index](blocks_BCkD.mean(2))
        weights = (self.gates[place](blocks_BCkD) + self.places[place]).softmax(2)
        return (self.pairs[index](blocks_BCkD) * weights).sum(2)

    def forward(self, q_BNTH: Tensor, x_BTD: Tensor, qk: QueryKey) -> Tensor:
        """What queries see of the normalised input, (B, N, T, H)."""
        length, width, pairs = x_BTD.size(1), q_BNTH.size(-1), []
        for index, window in enumerate(self.group.windows):
            turned = self.turned or window.factor == 1
            rotation = self.config.rotation_after(0, length, x_BTD, window.factor) if turned else None
            pairs.append(qk(self.keys_and_values(x_BTD, index), 0, self.group.heads, rotation))
        k, v = torch.cat(pairs, dim=1).unflatten(-1, (2, self.group.heads, width)).permute(2, 0, 3, 1, 4)
        if self.levels is not None:
            # A channel more, by which queries that have a 1 there add the levels to their scores.
            counts = torch.tensor([pair.size(1) for pair in pairs], device=k.device)
            levels_NS = self.levels.repeat_interleave(counts, dim=1) * math.sqrt(width)
            k = torch.cat([k, levels_NS[..., None].expand(*k.shape[:-1], 1).to(k.dtype)], dim=-1)
            q_BNTH, v = F.pad(q_BNTH, (0, 1), value=1.0), F.pad(v, (0, 1))
        mask, sees = mask_of(self.group.windows, length, k.device)
        y = F.scaled_dot_product_attention(q_BNTH, k, v, attn_mask=mask, scale=1.0 / math.sqrt(width))
        return y[..., :width] * sees


class DenseAttention(nn.Module):
    """Any groups of heads in the place of a ``SelfAttention``, for whole texts and without dropout; else ``Heads``'."""

    def __init__(self, config: LayerConfig, groups: Sequence[Group], gate: bool = False, turned: bool = True) -> None:
        super().__init__()
        self.norm, self.short_conv = config.norm_before(), config.short_convolution()
        self.query = projection(config.dim, config.dim, config.bias)
        self.qk = QueryKey(config, config.width_of_head, config.heads)
        self.groups: TypedList[Heads] = TypedList(Heads(config, group, gate, turned) for group in groups)
        self.out = projection(config.dim, config.dim, config.bias)

    def forward(self, x_BTD: Tensor, past: None = None, rotation_2TF: Tensor | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        assert past is None
        for part in (self.norm, self.short_conv):
            x_BTD = x_BTD if part is None else part(x_BTD)
        counts = [own.group.heads for own in self.groups]
        q_BNTH = split_heads(self.qk(self.query(x_BTD), sum(counts), 0, rotation_2TF), sum(counts))
        parts = [own(q, x_BTD, self.qk) for own, q in zip(self.groups, q_BNTH.split(counts, dim=1), strict=True)]
        return self.out(merge_heads(torch.cat(parts, dim=1)))
