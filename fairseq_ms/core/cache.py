"""KV caches, and the states of models, which move on as they read."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.ops.linear import convolve


class CannotTruncate(Exception):
    """A state has forgotten what it would need to go back: read the tokens again."""


class Reorderable(Protocol):
    """Anything with rows that beam search can permute, repeat and drop."""

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows."""


class State(ABC):
    """All that a model keeps of a batch of texts, of which it has read ``length`` tokens each.

    The forward pass reads a state and moves it on, without gradients. ``config`` is the model's.
    """

    length: int = 0

    def __init__(self, config: Any, batch_size: int) -> None:
        self.config, self.batch_size = config, batch_size

    @property
    def position(self) -> int | Tensor:
        """The position of the next token, a number or a tensor (1,)."""
        return self.length

    def move_on(self, count: int) -> None:
        """Count this many tokens as read."""
        self.length += count

    def copy(self) -> State:
        """A copy that shares no memory, so that both can go on."""
        return copy.deepcopy(self)

    def check_rows(self, tokens_BT: Tensor) -> None:
        """Raise ValueError for tokens of another batch size."""
        if (rows := tokens_BT.size(0)) != self.batch_size:
            raise ValueError(f"state must be of the batch size of the tokens {rows}: got {self.batch_size}")

    @abstractmethod
    def parts(self) -> Iterable[Reorderable]:
        """Everything that has a row for each text."""

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows."""
        self.batch_size = order.numel()
        for part in self.parts():
            part.reorder(order)

    def truncate(self, length: int) -> None:
        """Go back to the state after ``length`` tokens; raises ``CannotTruncate`` if that is forgotten."""
        if length != self.length:
            raise CannotTruncate(f"length must be {self.length}, since no other is known: got {length}")


class Unread(State):
    """The state of texts that were read without one: the first call that continues them reads them into ``known``."""

    def __init__(self, config: Any, tokens_BT: Tensor) -> None:
        super().__init__(config, tokens_BT.size(0))
        self.tokens_BT = tokens_BT
        self.known: State | None = None

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens read."""
        return self.tokens_BT.size(1) if self.known is None else self.known.length

    def parts(self) -> list[Reorderable]:
        return [] if self.known is None else [self.known]

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.tokens_BT = self.tokens_BT.index_select(0, order)

    def truncate(self, length: int) -> None:
        if self.known is not None:
            self.known.truncate(length)
        elif 0 < length <= self.length:
            self.tokens_BT = self.tokens_BT[:, :length]
        else:
            super().truncate(length)


class Rows:
    """A tensor (B, ...) that is replaced as a state moves on."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def put(self, x: Tensor) -> None:
        """Replace it."""
        self.x = x

    def reorder(self, order: Tensor) -> None:
        self.x = self.x.index_select(0, order)


class LastInputs(Rows):
    """The last N inputs (B, N, D) of a ``ShortConv``, zeros before a text."""

    def convolved(self, x_BTD: Tensor, weight_ND: Tensor) -> Tensor:
        """``ShortConv`` of T more positions, (B, T, D)."""
        joined = torch.cat([self.x, x_BTD], dim=1)
        # A view keeps all positions alive, which only matters if there are many.
        self.put(joined[:, 1:] if x_BTD.size(1) == 1 else joined[:, x_BTD.size(1) :].clone())
        return convolve(joined, weight_ND)


class KeyValueCache:
    """Keys and values of one attention layer, (2, B, K, length, H), in a buffer that is filled in place.

    It has room for ``capacity`` positions, which doubles when it is full, and the type and device of ``like``.

    Attributes:
        before: the last inputs of the layer's short convolution, if it has one
        bias: bias of attention to the result of ``append``; None where queries see all up to themselves
    """

    before: LastInputs | None = None
    bias: Tensor | None = None

    def __init__(self, batch_size: int, heads: int, head_dim: int, capacity: int, like: Tensor) -> None:
        shape = (2, batch_size, heads, max(capacity, 1), head_dim)
        self.buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.length = 0

    def append(self, pair_2BKTH: Tensor) -> Tensor:
        """Append keys and values of T positions; returns those of all S so far, a view (2, B, K, S, H)."""
        end = self.length + pair_2BKTH.size(3)
        if end > self.buffer.size(3):
            self.buffer = F.pad(self.buffer, (0, 0, 0, max(end, 2 * self.buffer.size(3)) - self.buffer.size(3)))
        self.buffer[:, :, :, self.length : end] = pair_2BKTH
        self.length = end
        return self.kept()[0]

    def convolved(self, x_BTD: Tensor, weight_ND: Tensor) -> Tensor:
        """``LastInputs.convolved`` by ``before``."""
        assert self.before is not None
        return self.before.convolved(x_BTD, weight_ND)

    def kept(self) -> tuple[Tensor, int]:
        """Keys and values (2, B, K, S, H) of the last S positions, and the number of positions so far."""
        return self.buffer[:, :, :, : self.length], self.length

    def reorder(self, order: Tensor) -> None:
        two, _, heads, capacity, head_dim = self.buffer.shape
        buffer = self.buffer.new_empty(two, order.numel(), heads, capacity, head_dim)
        buffer[:, :, :, : self.length] = self.buffer[:, :, :, : self.length].index_select(1, order)
        self.buffer = buffer
        if self.before is not None:
            self.before.reorder(order)

    def oldest_length(self) -> int:
        """The shortest length to which ``truncate`` can go back: a short convolution knows only the last inputs."""
        return 0 if self.before is None else self.length

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on; raises ``CannotTruncate`` where that is further than it can go."""
        least = self.oldest_length()
        if not least <= length <= self.length:
            raise CannotTruncate(f"length must be from {least} to {self.length}, which are known: got {length}")
        self.length = length
