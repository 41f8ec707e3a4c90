"""The top-down model: from coarse to fine (Multi-scale Transformer LMs, Section 3.2, Listing 1).

The coarsest scale is layers over pooled tokens; every finer scale first joins its own pooled tokens with the output of
the coarser one. Blocks are right-aligned (``pooling.py``), so that every position is predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import KeyValueCache, Rows, State
from fairseq_ms.core.config import ModelConfig
from fairseq_ms.core.joining import Coarser, Join
from fairseq_ms.core.layers import TransformerStack, TypedList
from fairseq_ms.core.model import LanguageModel
from fairseq_ms.core.ops.recompute import checkpointed
from fairseq_ms.core.pooling import Downsample, first_block, right_aligned
from fairseq_ms.core.scales import Scale, check_layers


@dataclass(frozen=True, kw_only=True)
class TopDownConfig(ModelConfig):
    """Sizes of a ``TopDown``.

    Attributes:
        scales: finest first, each with its number of layers
        downsampler: "avg", "max" or "conv"
    """

    scales: tuple[Scale, ...] = (Scale(1, 8), Scale(4, 8), Scale(16, 7), Scale(64, 7))
    downsampler: str = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.scales)


class TopDownScale(nn.Module):
    """Pooling to blocks, a norm, joining with the coarser scale, if there is one, and layers over blocks.

    ``ratio`` is the coarser scale's factor over this one's, None at the coarsest scale.
    """

    def __init__(self, scale: Scale, ratio: int | None, config: ModelConfig, downsampler: str) -> None:
        super().__init__()
        self.config = config
        self.factor = scale.factor
        self.pool = Downsample(downsampler, config.dim, scale.factor)
        self.recompute = config.recompute
        self.norm = config.make_norm()
        self.join = Join(config, ratio) if ratio is not None else None
        self.stack = TransformerStack(config, scale.layers)

    def forward(self, x_BTD: Tensor, coarse: Coarser | None, state: TopDownState | None = None) -> Tensor:
        """Token embeddings (B, T, D) and the coarser scale -> (B, C, D) for the blocks that end at these tokens."""
        start, before = (state.length, state.before.x) if state is not None else (0, None)
        first, end = first_block(start, self.factor), first_block(start + x_BTD.size(1), self.factor)
        if first == end:
            return x_BTD[:, :0]
        inputs, own = (x_BTD, start, before, *(coarse or ())), (self.pool, self.norm, self.join)
        out_BCD = checkpointed(self.blocks, *inputs, enabled=self.recompute, unhooked=own)
        # Block i ends at position i * k. Attention within a scale depends on differences of positions alone.
        position, ends = state and state.position, range(first * self.factor, end * self.factor, self.factor)
        rotation_2CF = self.config.rotation(position if isinstance(position, Tensor) else ends, out_BCD)
        return self.stack(out_BCD, state.caches[self.factor] if state is not None else None, rotation_2CF)

    def blocks(self, x_BTD: Tensor, start: int, before_BMD: Tensor | None, *coarse: Any) -> Tensor:
        """The inputs of the layers: pooled tokens after the norm, joined with a ``Coarser``, if there is one."""
        pooled_BCD = self.norm(right_aligned(x_BTD, self.pool, start, before_BMD))
        return pooled_BCD if self.join is None else self.join(pooled_BCD, *coarse)


class TopDownState(State):
    """What every scale needs of the past; a scale moves on when one of its blocks ends.

    Attributes:
        before: embeddings of the last K - 1 tokens, (B, K - 1, D); K is the coarsest factor
        caches: KV caches of the layers, by factor
        newest: output at the newest block (B, 1, D), by factor
    """

    def __init__(self, scales: Sequence[TopDownScale], batch_size: int, capacity: int, like: Tensor) -> None:
        coarsest = scales[0]
        super().__init__(coarsest.config, batch_size)
        shape = batch_size, coarsest.factor - 1, like.size(-1)
        self.before = Rows(like.new_full(shape, coarsest.pool.padding))
        self.caches: dict[int, Sequence[KeyValueCache]] = {}
        self.newest: dict[int, Rows] = {}
        for scale in scales:
            self.caches[scale.factor] = scale.stack.new_caches(batch_size, -(-capacity // scale.factor), like)
            self.newest[scale.factor] = Rows(like.new_zeros(batch_size, 0, like.size(-1)))

    def parts(self) -> Iterable[KeyValueCache | Rows]:
        yield self.before
        yield from self.newest.values()
        for caches in self.caches.values():
            yield from caches

    def coarser(self, factor: int, out_BCD: Tensor, finer: int) -> Coarser:
        """Keep a scale's new outputs (B, C, D); returns what the next blocks of the finer scale read of it."""
        newest = self.newest[factor]
        first = first_block(self.length, factor) - newest.x.size(1)
        x_BCD = torch.cat([newest.x, out_BCD], dim=1)
        newest.put(x_BCD[:, -1:].clone())
        return Coarser(x_BCD, first_block(self.length, finer) - first * (factor // finer))

    def remember(self, x_BTD: Tensor) -> None:
        """Move on by the tokens with these embeddings (B, T, D)."""
        kept = self.before.x.size(1)
        joined = torch.cat([self.before.x, x_BTD], dim=1)
        self.before.put(joined[:, joined.size(1) - kept :].clone())
        self.move_on(x_BTD.size(1))


class TopDown(LanguageModel[TopDownState]):
    """Scales from coarse to fine; features are the output of the finest."""

    def __init__(self, config: TopDownConfig) -> None:
        super().__init__(config)
        self.scales: TypedList[TopDownScale] = TypedList()
        coarser: Scale | None = None
        for scale in reversed(config.scales):
            ratio = coarser.factor // scale.factor if coarser is not None else None
            self.scales.append(TopDownScale(scale, ratio, config, config.downsampler))
            coarser = scale
        self.reset_parameters()

    def features(self, tokens_BT: Tensor, state: TopDownState | None = None) -> Tensor:
        return self.representations(tokens_BT, state)[1]

    def representations(self, tokens_BT: Tensor, state: TopDownState | None = None) -> dict[int, Tensor]:
        """By scale k, coarsest first, its output at right-aligned blocks: (B, ceil(T / k), D)."""
        x_BTD = self.embed(tokens_BT, state.position if state is not None else 0)
        outputs: dict[int, Tensor] = {}
        coarse: Coarser | None = None
        for scale, finer in pairwise([*self.scales, None]):
            # Pools tokens, joins them with the upsampled output of the coarser scale, and runs layers.
            out_BCD = outputs[scale.factor] = scale(x_BTD, coarse, state)
            if finer is not None:
                coarse = Coarser(out_BCD) if state is None else state.coarser(scale.factor, out_BCD, finer.factor)
        if state is not None:
            state.remember(x_BTD)
        return outputs

    def new_state(self, batch_size: int, capacity: int = 0, device: torch.device | None = None) -> TopDownState:
        self.check_batch_size(batch_size)
        return TopDownState(list(self.scales), batch_size, self.room(capacity), self.embed.like(device))
