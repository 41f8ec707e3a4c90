"""What a state remembers in buffers of fixed shapes that never move, so that a step is always the same operations.

How many tokens a state has read is then a tensor on its device, and so is all that follows from it: where a step
writes, and what its query sees, as a mask over every place there is. What is to be a CUDA graph can be nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.cache import KeyValueCache, LastInputs, Rows, State
from fairseq_ms.core.ops.attention import attend, merge_heads
from fairseq_ms.core.scales import UnfinishedBlock

# What attention on a GPU wants the number of keys to be a multiple of, where there is a mask.
_ALIGNED = 8


class Place:
    """Where the block of the next token is written: block b of ``factor`` tokens at b % S.

    Args:
        position_1: the position of that token, which a state moves on
        capacity: S
        factor: see above; one for each of N heads in a tensor (N, 1)

    Attributes:
        newest_1: the block, (1,) or (N, 1), once a step has begun
        index_1: its place
    """

    newest_1: Tensor
    index_1: Tensor

    def __init__(self, position_1: Tensor, capacity: int, factor: int | Tensor = 1) -> None:
        self.position_1, self.capacity, self.factor = position_1, capacity, factor

    def begin(self, phase: int) -> None:
        """Begin a step whose place among blocks is that of the position ``phase``."""
        self.phase, self.newest_1 = phase, self.position_1 // self.factor
        self.index_1 = self.newest_1 % self.capacity

    @property
    def full(self) -> bool:
        """Whether the step fills the last of the places."""
        return bool((self.phase + 1) % (self.capacity * self.factor) == 0)


class Slots(Place):
    """The places of keys and values, and which of them the next query sees.

    Args:
        position_1, capacity, factor: as a ``Place`` has them; S is made a multiple of 8
        like: a tensor of the wanted type and device
        visible: from the query's position and blocks (S,) or (N, S) to whether it sees them; without it, it sees all
            blocks up to its own. The last of the S places then stays zero: a query that sees no block sees this one

    Attributes:
        bias: of attention, (1, 1, 1, S) or (1, N, 1, S), once a step has begun
    """

    bias: Tensor

    def __init__(
        self,
        position_1: Tensor,
        capacity: int,
        like: Tensor,
        factor: int | Tensor = 1,
        visible: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.size = aligned(capacity + (visible is not None))
        super().__init__(position_1, self.size - (visible is not None), factor)
        self.visible, self.zeros_S = visible, like.new_zeros(self.size)
        self.places_S = torch.arange(self.capacity, device=like.device)

    def begin(self, phase: int) -> None:
        super().begin(phase)
        # The block that each place holds, below zero where it holds none.
        block_S = self.newest_1 - (self.newest_1 - self.places_S) % self.capacity
        hidden_S = block_S < 0
        if self.visible is not None:
            seen_S = self.visible(self.position_1, block_S) & ~hidden_S
            hidden_S = torch.cat([~seen_S, seen_S.any(-1, keepdim=True)], dim=-1)
        self.bias = self.zeros_S.masked_fill(hidden_S, -torch.inf).view(1, -1, 1, self.size)


def aligned(places: int) -> int:
    """At least so many places, as ``Slots`` has them."""
    return -(-places // _ALIGNED) * _ALIGNED


class FixedCache(KeyValueCache):
    """A ``KeyValueCache`` whose buffer (2, B, N, S, H) never moves; it takes one position a step.

    Args:
        cache: whose sizes it has
        slots: where a step writes and what it sees
        buffer: its own, unless it is a part of another
    """

    def __init__(self, cache: KeyValueCache, slots: Slots, buffer: Tensor | None = None) -> None:
        two, batch_size, heads, _, head_dim = cache.buffer.shape
        # Zeros: what is hidden has to be finite.
        if buffer is None:
            buffer = cache.buffer.new_zeros(two, batch_size, heads, slots.size, head_dim)
        self.buffer = buffer
        self.slots = slots
        self.before = cache.before and FixedInputs(cache.before.x)

    def append(self, k_BN1H: Tensor, v_BN1H: Tensor) -> tuple[Tensor, Tensor]:
        """Write the position of this step; all places, (B, N, S, H) each."""
        for part, new in zip(self.buffer, (k_BN1H, v_BN1H)):
            part.index_copy_(2, self.slots.index_1, new)
        return self.buffer[0], self.buffer[1]

    def attend(self, qkv: Tensor, heads: int, dropout: float, recompute: bool, sinks_N: Tensor | None = None) -> Tensor:
        # (B, 1, 3 * N * H) -> (3, B, N, 1, H)
        parts = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        self.buffer.index_copy_(3, self.slots.index_1, parts[1:])
        return merge_heads(self.read(parts[0], sinks_N))

    def read(self, q_BN1H: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        """What the query of this step sees, (B, N, 1, H); zero if that is nothing. Its slots say the rest."""
        return attend(q_BN1H, *self.buffer, bias=self.slots.bias, sinks_N=sinks_N)

    def load(self, cache: KeyValueCache) -> None:
        """Take over what another cache holds, and nothing else: NaN in places that a mask hides would be seen."""
        self.buffer.zero_()
        kept, end = cache.kept()
        count = min(kept.size(3), self.slots.capacity)
        places = torch.arange(end - count, end, device=kept.device) % self.slots.capacity
        self.buffer.index_copy_(3, places, kept[:, :, :, kept.size(3) - count :])
        if self.before is not None and cache.before is not None:
            self.before.put(cache.before.x)

    def reorder(self, order: Tensor) -> None:
        self.buffer.copy_(self.buffer.index_select(1, order))
        if self.before is not None:
            self.before.reorder(order)


class FixedRows(Rows):
    """``Rows`` (B, ...) in memory that never moves."""

    def put(self, x: Tensor) -> None:
        self.x.copy_(x)

    def load(self, rows: Rows) -> None:
        """Take over what another one holds, and nothing else."""
        count = rows.x.size(1)
        self.x[:, :count].copy_(rows.x)
        self.x[:, count:].zero_()

    def reorder(self, order: Tensor) -> None:
        self.x.copy_(self.x.index_select(0, order))


class FixedInputs(FixedRows, LastInputs):
    """``LastInputs`` in memory that never moves."""


class FixedBlock(FixedRows):
    """An ``UnfinishedBlock`` with a place for each of its positions.

    Args:
        block: whose sizes it has
        place: where a step writes
    """

    def __init__(self, block: UnfinishedBlock, place: Place) -> None:
        super().__init__(block.x.new_zeros(block.x.size(0), block.factor, block.x.size(2)))
        self.place = place

    def join(self, x_B1D: Tensor) -> Tensor:
        """Take in one more position: the block (B, k, D) in a step that finishes it, or else nothing of it."""
        if x_B1D.size(1):
            self.x.index_copy_(1, self.place.index_1, x_B1D)
        return self.x if self.place.full and x_B1D.size(1) else self.x[:, :0]


class FixedState(State):
    """What a model knows of a batch of texts, in buffers of fixed shapes that never move; it takes one token a step.

    A class is called with a model, how many rows there are, and for how many tokens of a text there is room. A replayed
    step runs no Python, so ``Steps`` counts the tokens.

    Attributes:
        length: the ``kind`` of the step that runs, which stands for all lengths of this kind
        position_1: the position of the next token
        places: what has to know it, told at the beginning of every step
    """

    position_1: Tensor
    places: Sequence[Any] = ()

    @property
    def position(self) -> Tensor:
        return self.position_1

    def move_on(self, count: int) -> None:
        self.position_1 += count

    def kind(self, length: int) -> int:
        """The kind of the step after so many tokens: one of the lengths after which steps are the same operations."""
        return -1

    def step(self, model: Any, tokens_B1: Tensor) -> Tensor:
        """Features (B, 1, D) of the next token."""
        return model.features(tokens_B1, self)

    def load(self, state: State) -> None:
        """Take over what another state of as many texts knows."""
        self.position_1.fill_(state.length)
        mine: Iterable[Any] = self.parts()
        for part, own in zip(mine, state.parts(), strict=True):
            part.load(own)
