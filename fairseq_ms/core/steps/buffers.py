"""KV caches and other buffers of fixed shapes at fixed addresses, so that every decoding step can be a CUDA graph.

The position of the next token is a tensor on the device, and so is all that follows from it: the places that a step
writes to, and the mask of places that its query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairseq_ms.core.cache import KeyValueCache, LastInputs, Rows, State
from fairseq_ms.core.ops.attention import attend
from fairseq_ms.core.pooling import UnfinishedBlock

T = TypeVar("T", bound=type)

# With a mask, attention on a GPU wants the number of keys to be a multiple of this.
_ALIGNED = 8


class Place:
    """The place in a ring buffer of S places that a step writes to: block b of ``factor`` tokens goes to b % S.

    Args:
        position_1: the position of the next token, a tensor (1,) that the state moves on
        capacity: S
        factor: tokens of a block, a number or a tensor (N, 1) with one for each head

    Attributes:
        newest_1: the block of the next token, (1,) or (N, 1); set by ``begin``
        index_1: its place in the buffer
    """

    newest_1: Tensor
    index_1: Tensor

    def __init__(self, position_1: Tensor, capacity: int, factor: int | Tensor = 1) -> None:
        self.position_1, self.capacity, self.factor = position_1, capacity, factor

    def begin(self, phase: int) -> None:
        """Compute the place for the next step, which ends the same blocks as a token at position ``phase`` would."""
        self.phase, self.newest_1 = phase, self.position_1 // self.factor
        self.index_1 = self.newest_1 % self.capacity

    @property
    def full(self) -> bool:
        """Whether the step writes to the last place, which completes the buffer."""
        return bool((self.phase + 1) % (self.capacity * self.factor) == 0)


class Slots(Place):
    """The place of a key and value in a ring buffer, and an attention bias that masks what a query may not see.

    Args:
        position_1, capacity, factor: as for ``Place``; S is rounded up to a multiple of 8
        like: a tensor of the wanted type and device
        visible: maps the query's position and block numbers, (S,) or (N, S), to True where the query sees the block;
            by default it sees all up to its own. With ``visible``, the last place holds a key and value of zero, for
            queries that see no block

    Attributes:
        bias: additive, (1, 1, 1, S) or (1, N, 1, S); set by ``begin``
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
        # The number of the block in each place, negative where the place is empty.
        block_S = self.newest_1 - (self.newest_1 - self.places_S) % self.capacity
        hidden_S = block_S < 0
        if self.visible is not None:
            seen_S = self.visible(self.position_1, block_S) & ~hidden_S
            hidden_S = torch.cat([~seen_S, seen_S.any(-1, keepdim=True)], dim=-1)
        self.bias = self.zeros_S.masked_fill(hidden_S, -torch.inf).view(1, -1, 1, self.size)


def aligned(places: int) -> int:
    """Round up to a multiple of 8."""
    return -(-places // _ALIGNED) * _ALIGNED


class FixedCache(KeyValueCache):
    """A ``KeyValueCache`` in a buffer (2, B, N, S, H) of fixed size and address, for one position a step.

    B, N and H are those of a growing ``cache``; the buffer is allocated unless given.
    """

    def __init__(self, cache: KeyValueCache, slots: Slots, buffer: Tensor | None = None) -> None:
        two, batch_size, heads, _, head_dim = cache.buffer.shape
        # Zeros, since a mask does not hide NaN: its weight of 0 times NaN is NaN.
        if buffer is None:
            buffer = cache.buffer.new_zeros(two, batch_size, heads, slots.size, head_dim)
        self.buffer = buffer
        self.slots = slots
        self.before = cache.before and FixedInputs(cache.before.x)

    def append(self, pair_2BK1H: Tensor) -> Tensor:
        """Write this step's key and value; returns the keys and values of all places, (2, B, K, S, H)."""
        return self.buffer.index_copy_(3, self.slots.index_1, pair_2BK1H)

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        return self.slots.bias

    def read(self, q_BN1H: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        """Attention of this step's query to the places that it sees, (B, N, 1, H)."""
        return attend(q_BN1H, *self.buffer, bias=self.slots.bias, sinks_N=sinks_N)

    def load(self, cache: KeyValueCache) -> None:
        """Copy the positions of a growing cache, and set all other places to zero."""
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
    """``Rows`` (B, ...) at a fixed address."""

    def put(self, x: Tensor) -> None:
        self.x.copy_(x)

    def load(self, rows: Rows) -> None:
        """Copy rows with as many positions or fewer, and set the rest to zero."""
        count = rows.x.size(1)
        self.x[:, :count].copy_(rows.x)
        self.x[:, count:].zero_()

    def reorder(self, order: Tensor) -> None:
        self.x.copy_(self.x.index_select(0, order))


class FixedInputs(FixedRows, LastInputs):
    """``LastInputs`` at a fixed address."""


class FixedBlock(FixedRows):
    """An ``UnfinishedBlock`` in a buffer (B, k, D) with a place for each of its k positions."""

    def __init__(self, block: UnfinishedBlock, place: Place) -> None:
        super().__init__(block.x.new_zeros(block.x.size(0), block.factor, block.x.size(2)))
        self.place = place

    def join(self, x_B1D: Tensor) -> Tensor:
        """Write one more position; returns the block (B, k, D) if this completes it, else (B, 0, D)."""
        if x_B1D.size(1):
            self.x.index_copy_(1, self.place.index_1, x_B1D)
        return self.x if self.place.full and x_B1D.size(1) else self.x[:, :0]


class FixedState(State):
    """A model's state in buffers of fixed shapes at fixed addresses, for one token of every row a step.

    Subclasses take the model, the number of rows B, and the longest text in tokens. ``Steps`` counts the tokens read,
    since a replayed step runs no Python.

    Attributes:
        length: the ``kind`` of the current step, in place of the number of tokens read
        position_1: the position of the next token, (1,)
        places: every ``Place`` of the state, whose ``begin`` runs first in a step
    """

    position_1: Tensor
    places: Sequence[Any] = ()

    @property
    def position(self) -> Tensor:
        return self.position_1

    def move_on(self, count: int) -> None:
        self.position_1 += count

    def kind(self, length: int) -> int:
        """The kind of step that follows ``length`` tokens; steps of one kind run the same operations.

        Kinds are named by a length: a step after that many tokens is of this kind.
        """
        return -1

    def step(self, model: Any, tokens_B1: Tensor) -> Tensor:
        """Run the model on the next token of every row, (B, 1) -> features (B, 1, D)."""
        return model.features(tokens_B1, self)

    def load(self, state: State) -> None:
        """Copy a growing state of the same number of texts."""
        self.position_1.fill_(state.length)
        mine: Iterable[Any] = self.parts()
        for part, own in zip(mine, state.parts(), strict=True):
            part.load(own)


# The class of the state by that of the model.
_STATES: dict[type, type] = {}


def state_of(model: type) -> Callable[[T], T]:
    """A decorator that makes a ``FixedState`` the state of a class of models, and of its subclasses by default."""

    def add(state: T) -> T:
        _STATES[model] = state
        return state

    return add


def state_for(model: type) -> Any:
    """The ``FixedState`` of a class of models, or None."""
    return next((_STATES[kind] for kind in model.__mro__ if kind in _STATES), None)


def first_position(like: Tensor) -> Tensor:
    """The position of a text's first token, (1,)."""
    return like.new_zeros(1, dtype=torch.long)
