"""The states of models over tokens and blocks, in buffers of fixed shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.bottomup import BottomUp, BottomUpState
from fairseq_ms.core.ops.window_attention import HeadGroup
from fairseq_ms.core.pooling import Coarser
from fairseq_ms.core.retina import Retina, RetinaState, WindowCache
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
    def length(self) -> int:
        return 0


class FixedRetina(FixedState, RetinaState):
    """The windows of every layer."""

    def __init__(self, model: Retina, batch_size: int, capacity: int) -> None:
        like, growing, groups = model.embed.like(), model.new_state(batch_size), model.groups
        self.position_1 = _first_position(like)
        # The blocks that a window has, and the unfinished one.
        rooms = [-(-group.far // group.factor) + 1 for group in groups]
        slots = [Slots(self.position_1, s, like, group.factor, group.visible) for group, s in zip(groups, rooms)]
        places = [Place(self.position_1, group.factor) for group in groups[1:]]
        self.places = [*slots, *places]
        caches: list[WindowCache] = []
        for cache in growing.caches:
            windows: Any = [FixedCache(*pair) for pair in zip(cache.windows, slots)]
            unfinished: Any = [FixedBlock(*pair) for pair in zip(cache.unfinished, places)]
            caches.append(FixedWindows(groups, windows, unfinished))
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
        seen = [Slots(at, room, like, k, HeadGroup(k, 0, capacity, 0).visible) for k, room in rooms]
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
