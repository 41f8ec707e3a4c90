"""The bottom-up model: from fine to coarse, then one aggregation layer.

Multi-scale Transformer LMs, Section 3.3, Listing 2. Every coarse scale pools the output of the finer one. Block i of
scale k covers positions ik .. (i+1)k-1 and is seen from its last position on; an unfinished block is never seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import KeyValueCache, State
from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.layers import QueryKey, ResidualLayer, TransformerStack, TypedList
from fairseq_ms.core.model import LanguageModel
from fairseq_ms.core.ops.linear import norm_linear, projection
from fairseq_ms.core.ops.recompute import checkpointed, keep_in_graph
from fairseq_ms.core.ops.window_attention import attend_blocks
from fairseq_ms.core.pooling import Downsample, UnfinishedBlock
from fairseq_ms.core.scales import Scale, check_layers, share_heads


@dataclass(frozen=True, kw_only=True)
class BottomUpConfig(ModelConfig):
    """Sizes of a ``BottomUp``.

    Attributes:
        scales: finest first, each with its number of layers; the coarse ones share the heads of the aggregation layer
            evenly unless they name their own
        downsampler: "avg", "max" or "conv"
        aggregation_gate: multiply the output of aggregation's attention by tanh(g), with g learned from 0

    Raises ValueError for a gate together with ``init_residual`` "zero", since both would stay at zero.
    """

    scales: tuple[Scale, ...] = (Scale(1, 9), Scale(4, 9), Scale(16, 8))
    downsampler: str = "avg"
    aggregation_gate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.scales)
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim {self.dim}, which aggregation shares: got {self.heads}")
        if len(self.scales) < 2:
            raise ValueError(f"scales must have one beside 1x: got {self.scales[0]}")
        share_heads(self.scales[1:], self.heads)
        if self.aggregation_gate and self.init_residual == "zero":
            raise ValueError("init_residual must not be zero with aggregation_gate, which is zero too: both would stay")


class BottomUpScale(nn.Module):
    """One coarse scale: pooling of ``ratio`` outputs of the finer scale, a norm, layers over blocks."""

    def __init__(self, scale: Scale, ratio: int, config: BottomUpConfig) -> None:
        super().__init__()
        self.config = config
        self.factor, self.ratio = scale.factor, ratio
        self.recompute = config.recompute
        self.pool = Downsample(config.downsampler, config.dim, ratio)
        self.norm = config.make_norm()
        self.stack = TransformerStack(config, scale.layers)

    def forward(
        self,
        fine_BCD: Tensor,
        unfinished: UnfinishedBlock | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        start: int | Tensor = 0,
    ) -> Tensor:
        """The finer scale's output (B, C, D) after ``start`` tokens -> (B, C // ratio, D) for finished blocks."""
        if unfinished is not None:
            fine_BCD = unfinished.join(fine_BCD)
        finished_BCD = fine_BCD[:, : fine_BCD.size(1) // self.ratio * self.ratio]
        if finished_BCD.size(1) == 0:
            return finished_BCD
        own = self.pool, self.norm
        out_BCD = checkpointed(lambda x: self.norm(self.pool(x)), finished_BCD, enabled=self.recompute, unhooked=own)
        rotation_2CF = self.config.rotation_after(start, out_BCD.size(1) * self.factor, out_BCD, self.factor)
        return self.stack(out_BCD, caches, rotation_2CF)


class AggregationAttention(nn.Module):
    """Attention from tokens to the blocks of all coarse scales, each with its own heads.

    Block i of scale k is seen by queries t >= (i+1)k-1. A head without a finished block to see gives exactly zero::

        k = 4      block  0 1 2
        t = 0..2          . . .     zero
        t = 3..6          x . .
        t = 7..10         x x .

    ``heads`` are those of each scale, such as {4: 6, 16: 6}; their number divides D.
    """

    def __init__(self, config: BottomUpConfig, heads: dict[int, int]) -> None:
        super().__init__()
        dim, total = config.dim, sum(heads.values())
        self.config = config
        self.heads, self.bounds = dict(heads), [Scale(factor).bounds for factor in heads]
        self.head_dim = dim // total
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm, self.short_conv = config.norm_before(), config.short_convolution()
        self.query = projection(dim, dim, config.bias)
        widths = [count * self.head_dim for count in heads.values()]
        self.coarse = TypedList(projection(dim, 2 * width, config.bias, rows=2 * (width,)) for width in widths)
        self.qk = QueryKey(config, self.head_dim, total)
        self.out = projection(dim, dim, config.bias)
        self.gate = nn.Parameter(torch.zeros(1)) if config.aggregation_gate else None

    def reset_parameters(self) -> None:
        """Close the gate."""
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    def forward(self, x_BTD: Tensor, state: BottomUpState | None, blocks: Sequence[Tensor]) -> Tensor:
        """x (B, T, D) and the new blocks (B, C, D) of every scale -> (B, T, D)."""
        outputs, start = [], state.position if state is not None else 0
        dropout = self.dropout if self.training else 0.0
        counts = list(self.heads.values())
        sinks = self.qk.sinks.split(counts) if self.qk.sinks is not None else [None] * len(counts)
        for level, (factor, q_BNTH) in enumerate(zip(self.heads, self._queries(x_BTD, start, state))):
            if state is None:
                k, v = self._keys_and_values(level, blocks[level]) if blocks[level].size(1) else 2 * (q_BNTH[:, :, :0],)
                outputs.append(attend_blocks(self.bounds[level], q_BNTH, k, v, dropout, self.recompute, sinks[level]))
                continue
            if blocks[level].size(1):
                state.aggregation[level].append(self._keys_and_values(level, blocks[level], start))
            outputs.append(state.attend_to(level, factor, q_BNTH, sinks[level]))
        y_BTD = self.out(torch.cat([y_BNTH.transpose(1, 2) for y_BNTH in outputs], dim=2).flatten(2))
        return y_BTD if self.gate is None else self.gate.tanh() * y_BTD

    def _keys_and_values(self, level: int, blocks_BCD: Tensor, start: int | Tensor = 0) -> Tensor:
        """Project a scale's new blocks to keys and values, (B, C, D) -> (2, B, N, C, H); level 0 is the finest."""
        factor, heads = list(self.heads.items())[level]
        count = blocks_BCD.size(1) * factor
        rotation_2CF = self.config.rotation_after(start, count, blocks_BCD, factor, self.head_dim)
        pair = self.qk(self.coarse[level](blocks_BCD), 0, heads, rotation_2CF)
        return pair.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)

    def _queries(self, x_BTD: Tensor, start: int | Tensor, state: BottomUpState | None) -> list[Tensor]:
        """Project tokens to queries of every scale's heads, (B, N, T, H) each."""
        rotation_2TF = self.config.rotation_after(start, x_BTD.size(1), x_BTD, head_dim=self.head_dim)
        before = state.aggregation[0] if state is not None else None
        queries, _ = norm_linear(x_BTD, self.norm, self.query, self.recompute, self.short_conv, before)
        queries = self.qk(queries, sum(self.heads.values()), 0, rotation_2TF)
        # (B, T, N * H) -> (B, N, T, H)
        heads = queries.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return list(heads.split(list(self.heads.values()), dim=1))


class BottomUpState(State):
    """KV caches of all layers, and unfinished blocks.

    Attributes:
        unfinished: for each coarse scale, outputs of the finer one that wait to be pooled
        coarse: for each coarse scale, KV caches of its layers
        aggregation: for each coarse scale, the KV cache of the aggregation layer over its blocks
        fine: KV caches of the layers at 1x
    """

    def __init__(
        self,
        config: BottomUpConfig,
        batch_size: int,
        unfinished: Sequence[UnfinishedBlock],
        coarse: Sequence[Sequence[KeyValueCache]],
        aggregation: Sequence[KeyValueCache],
        fine: Sequence[KeyValueCache],
    ) -> None:
        super().__init__(config, batch_size)
        self.unfinished, self.coarse, self.aggregation, self.fine = unfinished, coarse, aggregation, fine

    def parts(self) -> Iterable[KeyValueCache | UnfinishedBlock]:
        coarse = [cache for caches in self.coarse for cache in caches]
        return [*self.unfinished, *coarse, *self.aggregation, *self.fine]

    def attend_to(self, level: int, factor: int, q_BNTH: Tensor, sinks_N: Tensor | None) -> Tensor:
        """Attention from the next T tokens to the blocks of a scale, (B, N, T, H); level 0 is the finest scale."""
        k, v = self.aggregation[level].kept()[0]
        return attend_blocks(Scale(factor).bounds, q_BNTH, k, v, start=self.length, sinks_N=sinks_N)


class BottomUp(LanguageModel[BottomUpState]):
    """Coarse scales from fine to coarse, an aggregation layer that attends to them all, and layers over tokens."""

    def __init__(self, config: BottomUpConfig) -> None:
        super().__init__(config)
        finest, *coarse = config.scales
        pairs = pairwise(config.scales)
        self.coarse = TypedList(BottomUpScale(scale, scale.factor // fine.factor, config) for fine, scale in pairs)
        shared = share_heads(coarse, config.heads)
        attention = AggregationAttention(config, {scale.factor: scale.heads for scale in shared})
        depth = finest.layers + 1
        self.aggregate = ResidualLayer(config, attention, depth)
        self.stack = TransformerStack(config, finest.layers, depth)
        self.reset_parameters()

    def features(self, tokens_BT: Tensor, state: BottomUpState | None = None) -> Tensor:
        return self.representations(tokens_BT, state)[1]

    def representations(self, tokens_BT: Tensor, state: BottomUpState | None = None) -> dict[int, Tensor]:
        """By scale k, its output at finished blocks: (B, T // k, D)."""
        start = state.position if state is not None else 0
        x_BTD = self.embed(tokens_BT, start)
        representations: dict[int, Tensor] = {}
        out_BCD = x_BTD
        for level, scale in enumerate(self.coarse):
            past = (state.unfinished[level], state.coarse[level], start) if state is not None else ()
            out_BCD = scale(out_BCD, *past)
            representations[scale.factor] = out_BCD
        out_BTD = self.aggregate(x_BTD, state, list(representations.values()))
        rotation_2TF = self.config.rotation_after(start, tokens_BT.size(1), out_BTD)
        out_BTD = self.stack(out_BTD, state.fine if state is not None else None, rotation_2TF)
        if state is not None:
            state.move_on(tokens_BT.size(1))
        if self.training and (idle := self._idle(representations)):
            out_BTD = keep_in_graph(out_BTD, idle)
        return {1: out_BTD, **representations}

    def _idle(self, representations: dict[int, Tensor]) -> list[nn.Parameter]:
        """Parameters of scales without a finished block in a short text."""
        attention = self.aggregate.attention
        return [
            parameter
            for blocks, *modules in zip(representations.values(), self.coarse, attention.coarse)
            if blocks.size(1) == 0
            for module in [*modules, attention.qk]
            for parameter in module.parameters()
        ]

    def new_state(self, batch_size: int, capacity: int = 0, device: torch.device | None = None) -> BottomUpState:
        self.check_batch_size(batch_size)
        like, aggregate, capacity = self.embed.like(device), self.aggregate.attention, self.room(capacity)
        rooms = [capacity // scale.factor for scale in self.coarse]
        sizes = zip(aggregate.heads.values(), rooms)
        blocks = [KeyValueCache(batch_size, heads, aggregate.head_dim, room, like) for heads, room in sizes]
        blocks[0].before = self.config.last_inputs(batch_size, like)
        return BottomUpState(
            self.config,
            batch_size,
            [UnfinishedBlock(batch_size, scale.ratio, like) for scale in self.coarse],
            [scale.stack.new_caches(batch_size, room, like) for scale, room in zip(self.coarse, rooms)],
            blocks,
            self.stack.new_caches(batch_size, capacity, like),
        )
