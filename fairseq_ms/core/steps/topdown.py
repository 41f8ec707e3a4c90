"""The state of a top-down model in buffers of fixed shapes."""

from __future__ import annotations

from torch import Tensor

from fairseq_ms.core.joining import Coarser
from fairseq_ms.core.steps.buffers import FixedCache, FixedRows, FixedState, Slots, first_position, state_of
from fairseq_ms.core.topdown import TopDown, TopDownState


@state_of(TopDown)
class FixedTopDown(FixedState, TopDownState):
    """KV caches and newest output of every scale; the coarsest scale whose block ends decides the kind of a step."""

    def __init__(self, model: TopDown, batch_size: int, capacity: int) -> None:
        like, scales = model.embed.like(), list(model.scales)
        super().__init__(scales, batch_size, 0, like)
        self.position_1 = first_position(like)
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
