"""The states of models over tokens and blocks, in buffers of fixed shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.bottomup import BottomUp, BottomUpState
from fairseq_ms.core.cache import KeyValueCache
from fairseq_ms.core.ops.window_attention import Heads
from fairseq_ms.core.pooling import Coarser
from fairseq_ms.core.retina import Retina, RetinaState, WindowCache
from fairseq_ms.core.scales import Scale
from fairseq_ms.core.steps.buffers import BlockReads, FixedBlock, FixedCache, FixedRows, FixedState, Place, Slots
from fairseq_ms.core.topdown import TopDown, TopDownState
from fairseq_ms.core.vanilla import Vanilla, VanillaState


def _first_position(like: Tensor) -> Tensor:
    return like.new_zeros(1, dtype=torch.long)


class FixedVanilla(FixedState, VanillaState):
    """Keys and values of every layer."""

    def __init__(self, model: Vanilla, batch_size: int, capacity: int) -> None:
        like, growing = model.embed.like(), model.new_state(batch_size)
        self.position_1 = _first_position(like)
        self.places = [slots := Slots(self.position_1, capacity, like)]
        super().__init__(model.config, batch_size, [FixedCache(cache, slots) for cache in growing.caches])


class FixedWindows(WindowCache):
    """What one layer remembers, where slots know what a query sees."""

    @property
    def continues(self) -> bool:
        return True

    def see(self, window: KeyValueCache, scale: Scale, heads: Heads, sinks_N: Tensor | None) -> Tensor:
        q_BN1H, k_BN1H, v_BN1H = heads
        window.append(k_BN1H, v_BN1H)
        assert isinstance(window, FixedCache)
        return window.read(q_BN1H, sinks_N=sinks_N)


class FixedRetina(FixedState, RetinaState):
    """The windows of every layer."""

    def __init__(self, model: Retina, batch_size: int, capacity: int) -> None:
        like, growing = model.embed.like(), model.new_state(batch_size)
        self.position_1 = _first_position(like)
        # Layers share the slots of their windows, whatever heads these have.
        windows = {scale.window: scale for turn in model.turns for scale in turn}
        slots = {
            name: Slots(self.position_1, scale.most_blocks(capacity), like, scale.factor, scale.visible)
            for name, scale in windows.items()
        }
        coarse = {scale.factor for scale in windows.values()} - {1}
        places = {factor: Place(self.position_1, factor) for factor in coarse}
        self.places = [*slots.values(), *places.values()]
        caches: list[WindowCache] = []
        for cache in growing.caches:
            own: Any = [FixedCache(kept, slots[scale.window]) for kept, scale in zip(cache.windows, cache.scales)]
            unfinished: Any = [FixedBlock(block, places[block.factor]) for block in cache.unfinished]
            caches.append(FixedWindows(cache.scales, own, unfinished))
        super().__init__(model.config, batch_size, caches)


class FixedTopDown(FixedState, TopDownState):
    """What every scale remembers; a step is of the kind of the coarsest scale of which a block ends."""

    def __init__(self, model: TopDown, batch_size: int, capacity: int) -> None:
        like, scales = model.embed.like(), list(model.scales)
        super().__init__(scales, batch_size, 0, like)
        self.position_1 = _first_position(like)
        self.before = FixedRows(self.before.x)
        self.newest = {factor: FixedRows(like.new_zeros(batch_size, 1, like.size(-1))) for factor in self.newest}
        slots = {k: Slots(self.position_1, -(-capacity // k), like, k) for k in self.caches}
        self.caches = {k: [FixedCache(cache, slots[k]) for cache in caches] for k, caches in self.caches.items()}
        self.places = list(slots.values())

    def kind(self, length: int) -> int:
        return max(factor for factor in self.caches if length % factor == 0)

    def coarser(self, factor: int, out_BCD: Tensor, finer: int) -> Coarser:
        newest = self.newest[factor]
        if out_BCD.size(1):
            newest.put(out_BCD)
        return Coarser(newest.x, self.position_1 % factor // finer)


class FixedBottomUp(FixedState, BottomUpState):
    """What every scale remembers; a step is of the kind of the coarsest scale of which a block ends."""

    def __init__(self, model: BottomUp, batch_size: int, capacity: int) -> None:
        like, growing = model.embed.like(), model.new_state(batch_size)
        self.position_1 = at = _first_position(like)
        self.factors = [scale.factor for scale in model.coarse]
        rooms = [(k, -(-capacity // k)) for k in self.factors]
        blocks = [Place(at, k // finer, finer) for finer, k in pairwise([1, *self.factors])]
        coarse = [Slots(at, room, like, k) for k, room in rooms]
        seen = [Slots(at, room, like, k, Scale(k).visible) for k, room in rooms]
        fine = Slots(at, capacity, like)
        self.places = [*blocks, *coarse, *seen, fine]
        unfinished: Any = [FixedBlock(*pair) for pair in zip(growing.unfinished, blocks)]
        layers = [[FixedCache(cache, slots) for cache in own] for own, slots in zip(growing.coarse, coarse)]
        aggregation: Any = [BlockReads(*pair) for pair in zip(growing.aggregation, seen)]
        rest = [FixedCache(cache, fine) for cache in growing.fine]
        super().__init__(model.config, batch_size, unfinished, layers, aggregation, rest)

    def kind(self, length: int) -> int:
        # The last position of the greatest block that ends, or of none.
        return max(factor for factor in (1, *self.factors) if (length + 1) % factor == 0) - 1
