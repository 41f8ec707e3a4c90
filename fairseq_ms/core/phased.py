"""The state of streams in buffers of fixed shapes, for a model whose scales move on at different tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairseq_ms.core.cache import Reorderable, State
from fairseq_ms.core.fixed import FixedRows
from fairseq_ms.core.memory import StreamState

if TYPE_CHECKING:
    from fairseq_ms.core.transformer_ql import TransformerQL


class PhasedStream(State):
    """A ``FixedStream`` with a kind of step for every place in a segment, ``segment_len`` kinds in all.

    The place says how many states each scale has by then, so a step does what a ``StreamState`` does with a piece of
    one token, in slices of known lengths; no mask is needed.

    Attributes:
        mems: as in ``StreamState``
        moving: by the memories' names, what the segment has for them so far, with room for a whole one
        done: how many tokens there were in the segment when the state was loaded, less those before
    """

    def __init__(self, model: TransformerQL, batch_size: int) -> None:
        super().__init__(model.config, batch_size)
        self.model, self.done = model, 0
        self.length = torch.zeros(1, dtype=torch.long, device=model.u.device)
        self.caches = model.segment_caches(batch_size)
        self.mems = {name: FixedRows(x.clone()) for name, x in model.new_memory(batch_size).states.items()}
        shapes = {name: (batch_size, count, model.config.dim) for name, count in model.done(model.segment_len).items()}
        self.moving = {name: FixedRows(model.u.new_zeros(shape)) for name, shape in shapes.items()}

    def parts(self) -> Iterable[Reorderable]:
        buffers = [FixedRows(cache.buffer.transpose(0, 1)) for cache in self.caches.values()]
        return [*self.mems.values(), *self.moving.values(), *buffers]

    def kind(self, length: int) -> int:
        # The place of the token in its segment.
        return (length + self.done) % self.model.segment_len

    @torch.no_grad()
    def load(self, state: State) -> None:
        assert isinstance(state, StreamState)
        assert not state.waiting_BT.size(1)
        self.length.fill_(state.length)
        self.done = state.done - state.length
        positions = self.model.sinusoids()
        for name, x in state.mems.items():
            self.mems[name].put(x)
            if state.done:
                moving = state.moving[name]
                self.moving[name].x[:, : moving.size(1)].copy_(moving)
        for name, cache in self.caches.items():
            # The weights may be others than they were.
            cache.r_PNH.copy_(cache.attention.project(positions))
            if state.done:
                kept, count = state.caches[name].kept()
                cache.buffer[:, :, :, :count].copy_(kept)

    @torch.no_grad()
    def advance(self, tokens_B1: Tensor) -> Tensor:
        """Outputs (B, 1, D) of the next token of the streams."""
        model, mems = self.model, {name: rows.x for name, rows in self.mems.items()}
        done, before = model.done(self.phase), dict(mems)
        for name, m_BMD in mems.items():
            if name not in self.caches:
                before[name] = torch.cat([m_BMD, self.moving[name].x[:, : done[name]]], dim=1)
                continue
            self.caches[name].length = m_BMD.size(1) + done[name]
            if not self.phase:
                self.caches[name].begin(m_BMD)
        y_B1D, moving = model.forward_segment(model.embed_tokens(tokens_B1), before, model.u, self.caches)
        for name, x_BTD in moving.items():
            self.moving[name].x[:, done[name] : done[name] + x_BTD.size(1)] = x_BTD
        self.length += 1
        if self.phase == model.segment_len - 1:
            after, _ = model.remember({name: rows.x for name, rows in self.moving.items()}, mems)
            for name, x_BMD in after.items():
                self.mems[name].put(x_BMD)
        return y_B1D
