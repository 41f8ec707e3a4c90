"""What a model remembers of the tokens it has read, in buffers that are filled in place."""

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
    """A state has forgotten what it would need to go back; the caller starts from the tokens again."""


class Reorderable(Protocol):
    """Anything with rows that beam search can permute, repeat and drop."""

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows."""


class State(ABC):
    """What a model knows of a batch of texts, ``length`` tokens into every row; nothing of it hides in the model.

    A model's forward pass reads a state and moves it on, without gradients.

    Args:
        config: that of its model
        batch_size: B

    Attributes:
        length: tokens read
    """

    length: int = 0

    def __init__(self, config: Any, batch_size: int) -> None:
        self.config, self.batch_size = config, batch_size

    @property
    def position(self) -> int | Tensor:
        """The position of the next token, for embeddings and rotations: ``length``, or the same in a tensor (1,)."""
        return self.length

    def move_on(self, count: int) -> None:
        """Count tokens that have been read."""
        self.length += count

    def copy(self) -> State:
        """One that knows the same and shares no memory with this one, so that both can go on."""
        return copy.deepcopy(self)

    def check_rows(self, tokens_BT: Tensor) -> None:
        """Raise ValueError unless there are as many rows of tokens as of texts."""
        if tokens_BT.size(0) != self.batch_size:
            wanted = f"state must be of the batch size of the tokens {tokens_BT.size(0)}"
            raise ValueError(f"{wanted}: got {self.batch_size}")

    @abstractmethod
    def parts(self) -> Iterable[Reorderable]:
        """Everything that has a row for each text."""

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows.

        Whoever calls this leaves out an order that changes nothing: finding that out means waiting for a GPU.
        """
        self.batch_size = order.numel()
        for part in self.parts():
            part.reorder(order)

    def truncate(self, length: int) -> None:
        """Go back to the state after ``length`` tokens; raises ``CannotTruncate`` if that is forgotten."""
        if length != self.length:
            raise CannotTruncate(f"length must be {self.length}, since no other is known: got {length}")


class Unread(State):
    """A text that was read without a state: whoever continues it reads it again, once, into the state ``known``."""

    def __init__(self, config: Any, tokens_BT: Tensor) -> None:
        super().__init__(config, tokens_BT.size(0))
        self.tokens_BT = tokens_BT
        self.known: State | None = None

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens of the text, and those after it."""
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
    """A tensor with a row for each text, which a state replaces as it moves on."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def put(self, x: Tensor) -> None:
        """Replace it."""
        self.x = x

    def reorder(self, order: Tensor) -> None:
        self.x = self.x.index_select(0, order)


class LastInputs(Rows):
    """The last N inputs (B, N, D) of a ``ShortConv``; before a text there are zeros."""

    def convolved(self, x_BTD: Tensor, weight_ND: Tensor) -> Tensor:
        """T more positions, each plus the N before it times their weights."""
        joined = torch.cat([self.x, x_BTD], dim=1)
        # One token may stay a view; a view of more would keep all of them alive.
        self.put(joined[:, 1:] if x_BTD.size(1) == 1 else joined[:, x_BTD.size(1) :].clone())
        return convolve(joined, weight_ND)


class KeyValueCache:
    """Keys and values of one attention layer, (B, N, length, H) each, in buffers that are filled in place.

    Args:
        batch_size: B
        heads: K, of keys
        head_dim: H
        capacity: positions to allocate; the buffers double when they are full
        like: a tensor of the wanted type and device

    Attributes:
        before: what the layer's short convolution remembers, if it has one
        bias: of attention to what ``append`` gives; None where queries see all up to themselves
    """

    before: LastInputs | None = None
    bias: Tensor | None = None

    def __init__(self, batch_size: int, heads: int, head_dim: int, capacity: int, like: Tensor) -> None:
        shape = (2, batch_size, heads, max(capacity, 1), head_dim)
        self.buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.length = 0

    def append(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Append T positions; return all keys and values so far, views (B, N, S, H) each."""
        end = self.length + k_BNTH.size(2)
        if end > self.buffer.size(3):
            self.buffer = F.pad(self.buffer, (0, 0, 0, max(end, 2 * self.buffer.size(3)) - self.buffer.size(3)))
        self.buffer[0, :, :, self.length : end] = k_BNTH
        self.buffer[1, :, :, self.length : end] = v_BNTH
        self.length = end
        k, v = self.kept()[0]
        return k, v

    def append_both(self, pair_2BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """``append`` of keys and values that lie in one tensor, which some caches write at once."""
        return self.append(*pair_2BKTH.unbind(0))

    def convolved(self, x_BTD: Tensor, weight_ND: Tensor) -> Tensor:
        """``LastInputs.convolved`` of the inputs that the cache keeps."""
        assert self.before is not None
        return self.before.convolved(x_BTD, weight_ND)

    def kept(self) -> tuple[Tensor, int]:
        """Keys and values (2, B, N, S, H) of the last S positions that it has, and how many there have been."""
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
