"""The state of a HAED in memory that never moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_ms.core.haed import HAED
from fairseq_ms.core.hierarchical.caches import ChunkCaches, HAEDState, RowCaches
from fairseq_ms.core.hierarchical.chunks import Unfinished
from fairseq_ms.core.ops.lstm import replaced
from fairseq_ms.core.steps.buffers import FixedState


class FixedRowCaches(RowCaches):
    """``RowCaches`` whose attention runs over all the room there is, and not over what the longest row has of it."""

    def __init__(self, caches: RowCaches, room: int) -> None:
        caches.reserve(room)
        self.buffers, self.lengths_B, self.inputs_BLND = caches.buffers, caches.lengths_B, caches.inputs_BLND

    def seen(self, place_RC: Tensor) -> int:
        return self.buffers.size(4)


class FixedUnfinished(Unfinished):
    """The chunks that rows are in; nobody knows which of them end with a token, but whether any may."""

    may_end = False

    def __init__(self, unfinished: Unfinished) -> None:
        self.tokens_BL, self.place_B, self.counts_B = unfinished.tokens_BL, unfinished.place_B, unfinished.counts_B
        self.fresh = False

    def begin(self, phase: int) -> None:
        """Begin a step at whose end chunks may end or not."""
        self.may_end = bool(phase)

    def rows_of(self, ends_B: Tensor) -> tuple[Tensor, Tensor]:
        row_B = torch.arange(ends_B.numel(), device=ends_B.device)
        return (row_B if self.may_end else row_B[:0]), ends_B


class FixedChunks(FixedState, HAEDState):
    """What a step or an order makes anew is copied to where it belongs."""

    def __init__(self, model: HAED, batch_size: int, capacity: int) -> None:
        state = model.new_state(batch_size, capacity)
        main, decoder, unfinished = state.main, state.decoder, FixedUnfinished(state.unfinished)
        if isinstance(main, RowCaches):
            main = FixedRowCaches(main, model.config.chunks_of(capacity))
        if isinstance(decoder, ChunkCaches):
            decoder.layers = FixedRowCaches(decoder.layers, 0)
        super().__init__(model.config, main, decoder, unfinished)
        self.places = [unfinished]
        self.homes = tensors(self)
        self.position_1 = self.unfinished.place_B.new_zeros(1)

    def kind(self, length: int) -> int:
        # Whether chunks may end: those of fixed length do so at the same time in all rows.
        return int(self.config.segmentation == "words" or length % self.config.max_segment_len == 0)

    def move_on(self, count: int, ended_B: Tensor | None = None) -> None:
        super().move_on(count)
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

    def load(self, state: Any) -> None:
        self.position_1.fill_(state.length)
        for (_, _, home), (_, _, x) in zip(self.homes, tensors(state), strict=True):
            # One of them may have more room than the other.
            for sizes in (x.shape, home.shape):
                home, x = (part[tuple(slice(size) for size in sizes)] for part in (home, x))
            home.copy_(x)


def tensors(state: HAEDState) -> list[tuple[Any, str, Tensor]]:
    """All that a state carries along, each with its owner and its name there."""
    owners = *state.parts(), getattr(state.decoder, "layers", None)
    named = [(owner, *item) for owner in owners if owner is not None for item in vars(owner).items()]
    return [(owner, name, x) for owner, name, x in named if isinstance(x, Tensor)]
