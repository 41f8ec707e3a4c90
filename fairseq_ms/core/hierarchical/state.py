"""What a HAED knows of its texts between two tokens, in buffers that grow or in ones of fixed shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fairseq_ms.core.cache import Reorderable, State
from fairseq_ms.core.hierarchical.caches import ChunkCaches, RowCaches
from fairseq_ms.core.hierarchical.chunks import Unfinished
from fairseq_ms.core.hierarchical.config import HAEDConfig
from fairseq_ms.core.ops.lstm import LSTMState, replaced


class HAEDState(State):
    """What main model and chunk decoder know of every row, and the chunk that it is in."""

    def __init__(
        self,
        config: HAEDConfig,
        main: RowCaches | LSTMState,
        decoder: LSTMState | ChunkCaches,
        unfinished: Unfinished,
    ) -> None:
        super().__init__(config, unfinished.place_B.numel())
        self.main, self.decoder, self.unfinished = main, decoder, unfinished

    def parts(self) -> Iterable[Reorderable]:
        return self.main, self.decoder, self.unfinished

    def tensors(self) -> list[tuple[Any, str, Tensor]]:
        """All that it carries along, each with its owner and its name there."""
        owners = *self.parts(), getattr(self.decoder, "layers", None)
        named = [(owner, *item) for owner in owners if owner is not None for item in vars(owner).items()]
        return [(owner, name, x) for owner, name, x in named if isinstance(x, Tensor)]

    def move_on(self, count: int, ended_B: Tensor | None) -> None:
        """Be behind so many more tokens."""
        self.length += count

    def fixed(self, capacity: int) -> FixedChunks:
        return FixedChunks(self, capacity)


class FixedChunks(HAEDState):
    """The same in memory that never moves: what is made anew by a step or an order is copied there."""

    def __init__(self, state: HAEDState, capacity: int) -> None:
        super().__init__(state.config, state.main, state.decoder, state.unfinished)
        for caches, room in ((self.main, self.config.chunks_of(capacity)), (getattr(self.decoder, "layers", None), 0)):
            if isinstance(caches, RowCaches):
                caches.reserve(room)
                caches.fixed = True
        self.unfinished.fresh, self.places = False, [self.unfinished]
        self.homes = self.tensors()
        self.length = self.unfinished.place_B.new_zeros(1)

    def kind(self, length: int) -> int:
        # Whether chunks may end: those of fixed length do so at the same time in all rows.
        return int(self.config.segmentation == "words" or length % self.config.max_segment_len == 0)

    def move_on(self, count: int, ended_B: Tensor | None) -> None:
        super().move_on(count, ended_B)
        self._return(ended_B)

    def _return(self, ended_B: Tensor | None = None) -> None:
        """Copy what was made anew to where it belongs; what the main model made of chunks that go on is forgotten."""
        for owner, name, home in self.homes:
            now = getattr(owner, name)
            if now is not home:
                home.copy_(now if ended_B is None or owner is not self.main else replaced(home, ended_B, now))
                setattr(owner, name, home)

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self._return()

    def load(self, state: State) -> None:
        assert isinstance(state, HAEDState)
        self.length.fill_(state.length)
        for (_, _, home), (_, _, x) in zip(self.homes, state.tensors(), strict=True):
            # One of them may have more room than the other.
            for sizes in (x.shape, home.shape):
                home, x = (part[tuple(slice(size) for size in sizes)] for part in (home, x))
            home.copy_(x)
