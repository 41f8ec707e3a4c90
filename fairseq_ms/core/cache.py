"""What a model remembers of the tokens it has read, in buffers that are filled in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fairseq_ms.core.layers import TransformerStack
from fairseq_ms.core.ops.attention import attend, merge_heads, split_qkv

if TYPE_CHECKING:
    from fairseq_ms.core.fixed import Place
    from fairseq_ms.core.hierarchical.chunks import Unfinished


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
        length: an integer, and a tensor (1,) from when on the buffers are of fixed shapes
        places: where a step writes; none unless the buffers are of fixed shapes
        phase: where in its blocks the token of such a step is, as a position
    """

    length: Any = 0
    places: Sequence[Place | Unfinished] = ()
    phase: int = -1

    def __init__(self, config: Any, batch_size: int) -> None:
        self.config, self.batch_size = config, batch_size

    @property
    def at(self) -> int:
        """Where the next token is, for whoever asks which blocks end with it and no more."""
        return self.phase if self.places else self.length

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
            raise CannotTruncate(f"length must be {self.length}, since what is before is forgotten: got {length}")

    def fixed(self, capacity: int) -> State:
        """A state that takes one token a step into buffers of fixed shapes, with room for so many in all.

        Of a state before its first token, which is not used any more. Raises ValueError for a state that has no such
        form.
        """
        raise ValueError(f"a state must have buffers of fixed shapes: {type(self).__name__} has none")

    def load(self, state: State) -> None:
        """Take over, into buffers of fixed shapes, what another state of as many texts knows."""
        self.length.fill_(state.length)
        mine: Iterable[Any] = self.parts()
        for part, own in zip(mine, state.parts(), strict=True):
            part.load(own)

    def kind(self, length: int) -> int:
        """The phase of a step behind so many tokens: steps of one phase are the same operations."""
        return -1


class Unread(State):
    """A text that was read without a state: whoever continues it reads it again, once, into the state ``known``."""

    def __init__(self, config: Any, tokens_BT: Tensor) -> None:
        super().__init__(config, tokens_BT.size(0))
        self.tokens_BT = tokens_BT
        self.known: State | None = None

    @property
    def length(self) -> int:
        """Tokens of the text, and those behind it."""
        return self.tokens_BT.size(1) if self.known is None else self.known.length

    def parts(self) -> list[Reorderable]:
        return [] if self.known is None else [self.known]

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.tokens_BT = self.tokens_BT.index_select(0, order)


class Rows:
    """A tensor with a row for each text, which a state replaces as it moves on."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def put(self, x: Tensor) -> None:
        """Replace it."""
        self.x = x

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.x = self.x.index_select(0, order)


class KeyValueCache:
    """Keys and values of one attention layer, (B, N, length, H) each, in buffers that are filled in place.

    Args:
        batch_size: B
        heads: N
        head_dim: H
        capacity: positions to allocate; the buffers double when they are full
        like: a tensor of the wanted type and device
    """

    def __init__(self, batch_size: int, heads: int, head_dim: int, capacity: int, like: Tensor) -> None:
        shape = (2, batch_size, heads, max(capacity, 1), head_dim)
        self.buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.length = 0

    @property
    def keys(self) -> Tensor:
        """The keys so far, a view (B, N, length, H)."""
        return self.buffer[0, :, :, : self.length]

    @property
    def values(self) -> Tensor:
        """The values so far, a view (B, N, length, H)."""
        return self.buffer[1, :, :, : self.length]

    def append(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Add T positions; all keys and values so far, views (B, N, S, H) each."""
        end = self.length + k_BNTH.size(2)
        if end > self.buffer.size(3):
            self._grow(end)
        self.buffer[0, :, :, self.length : end] = k_BNTH
        self.buffer[1, :, :, self.length : end] = v_BNTH
        self.length = end
        return self.keys, self.values

    def attend(self, qkv: Tensor, heads: int, dropout: float, recompute: bool) -> Tensor:
        """Causal attention from T more positions to themselves and all before: (B, T, 3 * N * H) -> (B, T, N * H)."""
        q, k, v = split_qkv(qkv, heads)
        k, v = self.append(k, v)
        return merge_heads(attend(q, k, v, causal=True, dropout=dropout, recompute=recompute))

    def kept(self) -> tuple[Tensor, int]:
        """Keys and values (2, B, N, S, H) of the last S positions that it has, and how many there have been."""
        return self.buffer[:, :, :, : self.length], self.length

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        two, _, heads, capacity, head_dim = self.buffer.shape
        buffer = self.buffer.new_empty(two, order.numel(), heads, capacity, head_dim)
        buffer[:, :, :, : self.length] = self.buffer[:, :, :, : self.length].index_select(1, order)
        self.buffer = buffer

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on."""
        assert 0 <= length <= self.length
        self.length = length

    def _grow(self, needed: int) -> None:
        two, batch_size, heads, capacity, head_dim = self.buffer.shape
        buffer = self.buffer.new_empty(two, batch_size, heads, max(needed, 2 * capacity), head_dim)
        buffer[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
        self.buffer = buffer


def stack_caches(stack: TransformerStack, batch_size: int, capacity: int, like: Tensor) -> list[KeyValueCache]:
    """One empty cache for each layer of a stack, of the type and on the device of ``like``."""
    attentions = [layer.attention for layer in stack.layers]
    return [KeyValueCache(batch_size, layer.heads, layer.head_dim, capacity, like) for layer in attentions]


class SlidingCache:
    """The last ``keep`` positions of keys and values, (B, N, position, H), addressed by absolute position.

    The buffer has room for twice as many; when it is full, what is still needed moves to its front, so a
    step costs the same at any position.
    """

    def __init__(self, batch_size: int, heads: int, head_dim: int, keep: int, like: Tensor) -> None:
        self.keep = keep
        self.buffer = torch.empty(2, batch_size, heads, 2 * keep, head_dim, dtype=like.dtype, device=like.device)
        self.first = 0
        self.end = 0

    def append(self, k_BNCH: Tensor, v_BNCH: Tensor) -> None:
        """Add C positions; only the last ``keep`` of them are kept if there are more."""
        count = k_BNCH.size(2)
        skipped = max(0, count - self.keep)
        used = self.end - self.first
        if used + count > self.buffer.size(3):
            kept = min(self.keep, used)
            if not skipped:
                self.buffer[:, :, :, :kept] = self.buffer[:, :, :, used - kept : used].clone()
            self.first = self.end - kept
            used = kept
        if skipped:
            self.first, used = self.end + skipped, 0
        self.buffer[0, :, :, used : used + count - skipped] = k_BNCH[:, :, skipped:]
        self.buffer[1, :, :, used : used + count - skipped] = v_BNCH[:, :, skipped:]
        self.end += count

    def view(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions start .. stop - 1."""
        assert self.first <= start <= stop <= self.end
        window = self.buffer[:, :, :, start - self.first : stop - self.first]
        return window[0], window[1]

    def kept(self) -> tuple[Tensor, int]:
        """As those of a ``KeyValueCache``."""
        return self.buffer[:, :, :, : self.end - self.first], self.end

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.buffer = self.buffer.index_select(1, order)


class UnfinishedBlock(Rows):
    """The positions (B, r, D) behind the last finished block of k of them, r < k.

    Args:
        batch_size: B
        factor: k
        like_BTD: what positions look like, for their width, type and device
    """

    def __init__(self, batch_size: int, factor: int, like_BTD: Tensor) -> None:
        super().__init__(like_BTD.new_zeros(batch_size, 0, like_BTD.size(-1)))
        self.factor = factor

    def join(self, x_BTD: Tensor) -> Tensor:
        """T more positions, behind those that waited: all of them, the first of a block; the rest waits again."""
        joined = torch.cat([self.x, x_BTD], dim=1) if self.x.size(1) else x_BTD
        self.x = joined[:, joined.size(1) - joined.size(1) % self.factor :].clone()
        return joined
