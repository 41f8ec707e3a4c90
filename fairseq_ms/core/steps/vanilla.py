"""The state of a vanilla model in buffers of fixed shapes."""

from __future__ import annotations

from fairseq_ms.core.steps.buffers import FixedCache, FixedState, Slots, first_position, state_of
from fairseq_ms.core.vanilla import Vanilla, VanillaState


@state_of(Vanilla)
class FixedVanilla(FixedState, VanillaState):
    """A KV cache for every layer."""

    def __init__(self, model: Vanilla, batch_size: int, capacity: int) -> None:
        like, growing = model.embed.like(), model.new_state(batch_size)
        self.position_1 = first_position(like)
        self.places = [slots := Slots(self.position_1, capacity, like)]
        super().__init__(model.config, batch_size, [FixedCache(cache, slots) for cache in growing.caches])
