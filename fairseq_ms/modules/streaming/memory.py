"""What a streaming model remembers between two calls, and one layer of it at work on a segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_ms.modules.kv_cache import KeyValueCache
from fairseq_ms.modules.streaming.relative_attention import RelativeLayer
from fairseq_ms.ops.recompute import checkpointed


@dataclass(frozen=True)
class Memory:
    """The past of B streams: states of all layers at the last segment boundary, and what came after it.

    Attributes:
        states: by name, (B, length, D) each, without gradient
        pending_BT: the tokens of the segment in progress, fewer than a segment; they are run over again
            together with what follows, so that a stream may be cut anywhere
    """

    states: dict[str, Tensor]
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
        keep = ~rows_B[:, None, None]
        return Memory({name: state * keep for name, state in self.states.items()}, self.pending_BT)

    def to(self, like: Tensor) -> Memory:
        """On the device and of the floating point type of ``like``."""
        states = {name: state.to(like) for name, state in self.states.items()}
        return Memory(states, self.pending_BT.to(like.device))

    def cpu(self) -> Memory:
        """On the CPU."""
        return Memory({name: state.cpu() for name, state in self.states.items()}, self.pending_BT.cpu())

    def state_dict(self) -> dict[str, Any]:
        """Tensors in a dictionary, in memory of their own and on the CPU, for a checkpoint."""
        states = {name: state.detach().cpu().clone() for name, state in self.states.items()}
        return {"states": states, "pending": self.pending_BT.cpu().clone()}

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> Memory:
        """The inverse of ``state_dict``."""
        return cls(dict(saved["states"]), saved["pending"])


def shift(memory_BMD: Tensor, segment_BTD: Tensor, count: int) -> Tensor:
    """The memory after the first ``count`` states of the segment have moved into it, without gradient."""
    length = memory_BMD.size(1)
    moving = segment_BTD[:, :count].detach()
    if count >= length:
        return moving[:, count - length :]
    return torch.cat([memory_BMD[:, count:], moving], dim=1)


class CachedPast(KeyValueCache):
    """Keys and values of the past of a layer, and its projected sinusoids of all distances (P, N, H)."""

    distances_PNH: Tensor

    @classmethod
    def of_memory(cls, layer: RelativeLayer, memory_BMD: Tensor, capacity: int, distances_PNH: Tensor) -> CachedPast:
        """The past that is a memory, with room for ``capacity`` positions of a segment."""
        k, v = layer.attention.keys_values(memory_BMD)
        past = cls(k.size(0), k.size(1), k.size(3), memory_BMD.size(1) + capacity, k)
        past.distances_PNH = distances_PNH
        past.append(k, v)
        return past


class LayerRun:
    """A layer at work on one segment: its memory, and the inputs that it has seen of the segment.

    Args:
        layer: a layer whose attention is relative
        memory_BMD: what precedes the segment
        positions_PD: sinusoids of the distances within memory and segment
        past: keys and values of the memory, where the segment comes in pieces; without, it comes whole
        recompute_layer: keep only the inputs and run the layer again in backward
    """

    def __init__(
        self,
        layer: RelativeLayer,
        memory_BMD: Tensor,
        positions_PD: Tensor,
        past: CachedPast | None = None,
        recompute_layer: bool = False,
    ) -> None:
        self.layer = layer
        self.memory_BMD = memory_BMD
        self.positions_PD = positions_PD
        self.past = past
        self.recompute_layer = recompute_layer
        self.inputs_BTD: Tensor | None = None

    def feed(self, x_BTD: Tensor) -> Tensor:
        """The layer's outputs for the next positions of the segment, (B, T, D) -> (B, T, D)."""
        if self.inputs_BTD is None:
            self.inputs_BTD = x_BTD
        else:
            assert self.past is not None, "without a cache the segment comes whole"
            self.inputs_BTD = torch.cat([self.inputs_BTD, x_BTD], dim=1)
        past = self.memory_BMD if self.past is None else self.past
        recompute = self.recompute_layer and self.past is None
        return checkpointed(self.layer, x_BTD, self.positions_PD, past, enabled=recompute)

    def shifted(self, count: int) -> Tensor:
        """The memory after the segment, of which ``count`` states move into it."""
        assert self.inputs_BTD is not None
        return shift(self.memory_BMD, self.inputs_BTD, count)

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.memory_BMD = self.memory_BMD.index_select(0, order)
        if self.past is not None:
            self.past.reorder(order)
        if self.inputs_BTD is not None:
            self.inputs_BTD = self.inputs_BTD.index_select(0, order)
