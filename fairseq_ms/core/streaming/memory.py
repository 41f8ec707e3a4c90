"""What a streaming model remembers between two calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

# The states a segment starts from, by name, (B, length, D) each: m of the papers' figures.
Mems = dict[str, Tensor]


class SavedMemory(TypedDict):
    """A memory as a checkpoint holds it."""

    states: Mems
    pending: Tensor


@dataclass(frozen=True)
class Memory:
    """The past of B streams: states of all layers at the last segment boundary, and what came after it.

    Attributes:
        states: by name, (B, length, D) each, without gradient
        pending_BT: the tokens of the segment in progress, fewer than a segment; they are run over again
            together with what follows, so that a stream may be cut anywhere
    """

    states: Mems
    pending_BT: Tensor

    @property
    def batch_size(self) -> int:
        return self.pending_BT.size(0)

    def reorder(self, order: Tensor) -> Memory:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows."""
        states = {name: state.index_select(0, order) for name, state in self.states.items()}
        return Memory(states, self.pending_BT.index_select(0, order))

    def forget(self, rows_B: Tensor) -> Memory:
        """The memory with the streams that are True in ``rows`` at their beginning again."""
        assert not self.pending_BT.size(1), "a stream is cut at a segment boundary"
        forgotten = rows_B[:, None, None]
        # Not by a product: a forward pass that overflowed leaves what is not finite.
        return Memory({name: state.masked_fill(forgotten, 0.0) for name, state in self.states.items()}, self.pending_BT)

    def finite(self) -> Memory:
        """The memory with the streams at their beginning again that have overflowed, as half precision can.

        They would make every pass overflow that still sees them. Nothing waits for the device.
        """
        if all(state.dtype != torch.float16 for state in self.states.values()):
            return self
        overflown = [~state.isfinite().flatten(1).all(1) for state in self.states.values()]
        return self.forget(torch.stack(overflown).any(0))

    def to(self, like: Tensor) -> Memory:
        """On the device and of the floating point type of ``like``."""
        states = {name: state.to(like) for name, state in self.states.items()}
        return Memory(states, self.pending_BT.to(like.device))

    def cpu(self) -> Memory:
        """On the CPU."""
        return Memory({name: state.cpu() for name, state in self.states.items()}, self.pending_BT.cpu())

    def state_dict(self) -> SavedMemory:
        """Tensors in a dictionary, in memory of their own and on the CPU, for a checkpoint."""
        states = {name: state.detach().cpu().clone() for name, state in self.states.items()}
        return {"states": states, "pending": self.pending_BT.cpu().clone()}

    @classmethod
    def from_state_dict(cls, saved: SavedMemory) -> Memory:
        """The inverse of ``state_dict``."""
        return cls(dict(saved["states"]), saved["pending"])
