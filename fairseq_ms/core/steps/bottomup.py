"""The state of a bottom-up model in buffers of fixed shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from fairseq_ms.core.bottomup import BottomUp, BottomUpState
from fairseq_ms.core.scales import Scale
from fairseq_ms.core.steps.buffers import FixedBlock, FixedCache, FixedState, Place, Slots, first_position, state_of


@state_of(BottomUp)
class FixedBottomUp(FixedState, BottomUpState):
    """KV caches of all layers and unfinished blocks; the coarsest scale whose block ends decides the kind of a step."""

    def __init__(self, model: BottomUp, batch_size: int, capacity: int) -> None:
        like, growing = model.embed.like(), model.new_state(batch_size)
        self.position_1 = at = first_position(like)
        self.factors = [scale.factor for scale in model.coarse]
        rooms = [(k, -(-capacity // k)) for k in self.factors]
        blocks = [Place(at, k // finer, finer) for finer, k in pairwise([1, *self.factors])]
        coarse = [Slots(at, room, like, k) for k, room in rooms]
        seen = [Slots(at, room, like, k, Scale(k).visible) for k, room in rooms]
        fine = Slots(at, capacity, like)
        self.places = [*blocks, *coarse, *seen, fine]
        unfinished: Any = [FixedBlock(*pair) for pair in zip(growing.unfinished, blocks)]
        layers = [[FixedCache(cache, slots) for cache in own] for own, slots in zip(growing.coarse, coarse)]
        aggregation = [FixedCache(*pair) for pair in zip(growing.aggregation, seen)]
        rest = [FixedCache(cache, fine) for cache in growing.fine]
        super().__init__(model.config, batch_size, unfinished, layers, aggregation, rest)

    def attend_to(self, level: int, factor: int, q_BNTH: Tensor, sinks_N: Tensor | None) -> Tensor:
        blocks: Any = self.aggregation[level]
        return blocks.read(q_BNTH, sinks_N)

    def kind(self, length: int) -> int:
        # The first position at which a block of the coarsest scale that ends here would end; 0 if none ends.
        return max(factor for factor in (1, *self.factors) if (length + 1) % factor == 0) - 1
