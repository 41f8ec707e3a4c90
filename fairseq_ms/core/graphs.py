"""Steps of generation as CUDA graphs: the kernels of a token are launched all at once, and nothing waits for the CPU.

A captured step does the same to the same memory whenever it is replayed, so it needs a state of fixed shapes
(``fixed.py``). Steps that differ in what they do, since blocks end at some of them, have a graph each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairseq_ms.core.adaptive import AdaptiveInput
from fairseq_ms.core.cache import State
from fairseq_ms.core.ops.device import has_graphs
from fairseq_ms.core.ops.recompute import autocast_dtype

if TYPE_CHECKING:
    from fairseq_ms.core.model import CausalModel

# Rooms for texts are powers of two from here on, so that the graphs of one text serve the next.
_LEAST_ROOM = 256


def takes_graphs(model: CausalModel, graphs: bool | None) -> bool:
    """Whether a model's steps are CUDA graphs: where they can be, if ``graphs`` is None.

    Raises ValueError where they are asked for and cannot be.
    """
    if graphs is False:
        return False
    device, why = next(model.parameters()).device, None
    if not model.has_fixed_steps:
        why = f"with {type(model).__name__}, whose steps have no fixed shapes"
    elif any(isinstance(module, AdaptiveInput) for module in model.modules()):
        why = "with an adaptive input, which waits to know the bands of its tokens"
    elif not has_graphs(device):
        why = f"on {device}, which has none"
    elif autocast_dtype(device) is not None:
        why = "under autocast, which casts weights anew"
    if graphs and why:
        raise ValueError(f"graphs must not be True {why}: got True")
    return why is None


def check_batch(batch_size: int, tokens_BT: Tensor) -> None:
    """Raise ValueError unless there are as many rows of tokens as a state has."""
    if tokens_BT.size(0) != batch_size:
        raise ValueError(f"state must be of the batch size of the tokens {tokens_BT.size(0)}: got {batch_size}")


class Steps:
    """The steps of a model over one state of fixed shapes; on a GPU, a CUDA graph for each kind of them.

    The first step of a kind runs as it is, the second is captured, and all others are replayed.

    Args:
        model: whose weights stay where they are
        batch_size: B
        capacity: tokens of a text that there is room for
    """

    # Where the model's weights are, and of what type, where the steps may serve another text.
    weights: list[tuple[int, torch.dtype]]

    def __init__(self, model: CausalModel, batch_size: int, capacity: int) -> None:
        self.model, self.capacity, self.length = model, capacity, 0
        self.state = model.new_state(batch_size).fixed(capacity)
        self.rows = batch_size
        self.tokens_B1 = torch.zeros(batch_size, 1, dtype=torch.long, device=next(model.parameters()).device)
        # By kind: None once a step has run, then its graph and the features that it gives.
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}

    def __reduce__(self) -> tuple:
        """A copy is None: graphs are of one model's weights."""
        return type(None), ()

    @classmethod
    def of(cls, model: CausalModel, batch_size: int, length: int) -> Steps:
        """Those that the model has kept, if they serve texts of this length, or new ones."""
        kept = model.steps
        # The model has none until its text is done, so that two texts at a time have a state each.
        length = min(length, model.max_length() or length)
        model.steps, weights = None, [(weight.data_ptr(), weight.dtype) for weight in model.state_dict().values()]
        if kept is None or kept.batch_size != batch_size or kept.capacity < length or kept.weights != weights:
            room = max(_LEAST_ROOM, 1 << (length - 1).bit_length())
            # What is made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                kept = cls(model, batch_size, min(room, model.max_length() or room))
            kept.weights = weights
        return kept

    @property
    def batch_size(self) -> int:
        return self.tokens_B1.size(0)

    @torch.no_grad()
    def begin(self, state: State) -> Steps:
        """Continue what another state knows, which stays as it is. Raises ValueError for one of another batch size."""
        check_batch(state.batch_size, self.tokens_B1)
        self.rows, self.length = state.batch_size, state.length
        self.state.load(state)
        return self

    @torch.no_grad()
    def __call__(self, tokens_B1: Tensor) -> Tensor:
        """Features (B, 1, D) of one more token of every row, in memory that the next step overwrites.

        Raises ValueError for other rows than there are, and a text longer than there is room for.
        """
        check_batch(self.rows, tokens_B1)
        if self.length >= self.capacity:
            most, got = self.capacity, self.length + 1
            raise ValueError(f"a text must have at most {most} tokens, for which its state has room: got {got}")
        self.tokens_B1[: self.rows].copy_(tokens_B1)
        kind = self.state.kind(self.length)
        self.length += 1
        return self.run(kind)[: self.rows]

    def run(self, kind: int) -> Tensor:
        """A step of a kind, from its graph if there is one."""
        if not has_graphs(self.tokens_B1.device) or kind not in self.graphs:
            self.graphs[kind] = None
            return self.step(kind)
        captured = self.graphs[kind]
        if captured is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = graph, self.step(kind)
            self.graphs[kind] = captured
        graph, x_B1D = captured
        graph.replay()
        return x_B1D

    def step(self, kind: int) -> Tensor:
        """What a step does."""
        self.state.phase = kind
        for place in self.state.places:
            place.begin(kind)
        return self.model.features(self.tokens_B1, self.state)

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat rows and drop the last ones."""
        self.rows = order.numel()
        missing = self.batch_size - self.rows
        self.state.reorder(torch.cat([order, order.new_zeros(missing)]) if missing else order)
