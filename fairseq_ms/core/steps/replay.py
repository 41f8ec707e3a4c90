"""Decoding steps as CUDA graphs: all kernels of a token are launched at once, and none waits for the CPU.

A replayed step runs the captured operations on the same memory, so it needs a state of fixed shapes (``FixedState``).
The blocks that end at a step decide which operations it has: each such kind of step is a graph of its own.
"""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn

from fairseq_ms.core.adaptive import AdaptiveInput
from fairseq_ms.core.cache import State
from fairseq_ms.core.ops.device import has_graphs
from fairseq_ms.core.ops.recompute import autocast_dtype, hooked
from fairseq_ms.core.steps.buffers import state_for

# Buffers have room for a power of two of tokens, at least this many, so that the graphs of one text serve the next.
_LEAST_ROOM = 256

# torch captures one graph at a time in a process.
_CAPTURING = threading.Lock()
# Models whose capture failed, and the failed graphs, to which torch's allocator may still refer.
_REFUSED: WeakSet[nn.Module] = WeakSet()
_BROKEN: list[torch.cuda.CUDAGraph] = []


def has_steps(model: Any) -> bool:
    """Whether a model has a state of fixed shapes, which CUDA graphs need."""
    return state_for(type(model)) is not None


def takes_graphs(model: Any, graphs: bool | None) -> bool:
    """Whether a model decodes by CUDA graphs; for None, wherever it can, unless FAIRSEQ_MS_GRAPHS=0 is set.

    Raises ValueError if ``graphs`` is True and it cannot.
    """
    if graphs is False or (graphs is None and os.environ.get("FAIRSEQ_MS_GRAPHS") == "0"):
        return False
    device, why = next(model.parameters()).device, None
    if not has_steps(model):
        why = f"with {type(model).__name__}, which has no steps of fixed shapes"
    elif any(isinstance(module, AdaptiveInput) for module in model.modules()):
        why = "with an adaptive input, which has to look at tokens to know their bands"
    elif any(map(hooked, model.modules())):
        why = "with hooks, which a replayed step does not call"
    elif not has_graphs(device):
        why = f"on {device}: CUDA graphs need a GPU"
    elif autocast_dtype(device) is not None:
        why = "under autocast, which casts weights again at every step"
    elif model in _REFUSED:
        why = f"with this {type(model).__name__}, whose steps could not be captured"
    if graphs and why:
        raise ValueError(f"graphs must not be True {why}: got True")
    return why is None


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's graphs are captured; torch's default one is that of the first device."""
    return torch.cuda.Stream(device)


# Types that keys compare by value; all others have to be the same object.
_VALUES = {bool, int, float, complex, str, tuple, torch.dtype, torch.device}
# Attributes of modules that do not matter to graphs: hooks (a model with hooks has no graphs) and the mode.
_USUAL = {*vars(nn.Module())} - {"_parameters", "_buffers", "_modules"}


def _key(model: nn.Module) -> list[Any]:
    """All that a captured step depends on: graphs are kept as long as the key stays the same.

    Of all modules, addresses, types and shapes of tensors, and other attributes, also in containers.
    """
    found: list[Any] = []
    seen: set[nn.Module] = set()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append((value.data_ptr(), value.dtype, value.shape, value.stride()))
        elif isinstance(value, nn.Module):
            if value not in seen:
                seen.add(value)
                found.append(type(value))
                add({name: part for name, part in vars(value).items() if name not in _USUAL})
        elif isinstance(value, dict):
            add([*value, *value.values()])
        elif isinstance(value, list | tuple | set):
            found.append(len(value))
            for part in value:
                add(part)
        else:
            found.append(value)

    add(model)
    return found


def _same(key: list[Any], other: list[Any]) -> bool:
    """Whether two keys are equal."""
    if len(key) != len(other):
        return False
    return all(a is b or (type(a) is type(b) and type(a) in _VALUES and a == b) for a, b in zip(key, other))


class Steps:
    """Decoding steps of a model over one state of fixed shapes; on a GPU, a CUDA graph for each kind of step.

    The first step of a kind runs eagerly, the second is captured, and later ones are replayed. The model's weights must
    keep their addresses; ``capacity`` is the longest text in tokens.
    """

    # The model's ``_key`` when these steps were made by ``of``.
    key: list[Any]

    def __init__(self, model: Any, batch_size: int, capacity: int) -> None:
        state_of = state_for(type(model))
        assert state_of is not None
        self.model, self.capacity, self.length = model, capacity, 0
        self.state = state_of(model, batch_size, capacity)
        self.tokens_B1 = torch.zeros(batch_size, 1, dtype=torch.long, device=next(model.parameters()).device)
        # By kind: None after the first step, then the graph and its output.
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        # Graphs share a memory pool, so that a step may overwrite the output of the one before, whatever its kind.
        self.pool: Any = None

    def __reduce__(self) -> tuple:
        """Copies and pickles are None, since graphs are bound to one model's weights."""
        return type(None), ()

    @classmethod
    def of(cls, model: Any, batch_size: int, length: int) -> Steps:
        """The steps that the model kept from its last text, if they fit, or new ones for a text of this length."""
        # Taken from the model until this text is done, since texts that are generated at the same time need a state
        # each; by a single pop, since they may begin in several threads.
        kept = vars(model).pop("steps", None)
        length, key = min(length, model.max_length() or length), _key(model)
        if kept is None or kept.batch_size != batch_size or kept.capacity < length or not _same(kept.key, key):
            kept = None  # so that there are never two at a time
            room = max(_LEAST_ROOM, 1 << (length - 1).bit_length())
            # Tensors made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                kept = cls(model, batch_size, min(room, model.max_length() or room))
            kept.key = key
        return kept

    @property
    def batch_size(self) -> int:
        return self.tokens_B1.size(0)

    @torch.no_grad()
    def begin(self, state: State) -> Steps:
        """Continue the texts of a growing state, from a copy; raises ValueError for another batch size."""
        state.check_rows(self.tokens_B1)
        self.state.load(state)
        self.state.batch_size, self.length = state.batch_size, state.length
        return self

    @torch.no_grad()
    def __call__(self, tokens_B1: Tensor) -> Tensor:
        """Read one more token of every row, (B, 1) -> features (B, 1, D), which the next step overwrites.

        Raises ValueError for another number of rows, and for texts longer than ``capacity``.
        """
        state, rows = self.state, self.state.batch_size
        state.check_rows(tokens_B1)
        if self.length >= self.capacity:
            most, got = self.capacity, self.length + 1
            raise ValueError(f"a text must have at most {most} tokens, for which its state has room: got {got}")
        self.tokens_B1[:rows].copy_(tokens_B1)
        kind = state.kind(self.length)
        self.length += 1
        return self.run(kind)[:rows]

    def run(self, kind: int) -> Tensor:
        """Run a step of a kind: eagerly, or by its graph."""
        is_first = kind not in self.graphs
        captured = self.graphs.setdefault(kind, None)
        if has_graphs(self.tokens_B1.device) and self.model not in _REFUSED and not is_first:
            captured = self.graphs[kind] = captured or self._capture(kind)
        if captured is None:
            return self.step(kind)
        graph, x_B1D = captured
        graph.replay()
        return x_B1D

    def _capture(self, kind: int) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Capture a step without running it: its graph and output, or None, with a warning, if that fails."""
        device = self.tokens_B1.device
        stream, graph = _capture_stream(device), torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            # The stream is entered here as well, since a capture that fails leaves it the current one.
            # "thread_local", so that other threads may use the GPU meanwhile.
            with (
                _CAPTURING,
                torch.cuda.device(device),
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"),
            ):
                return graph, self.step(kind)
        except RuntimeError as error:
            _REFUSED.add(self.model)
            _BROKEN.append(graph)
            with suppress(RuntimeError, AttributeError, IndexError):
                # Its old state may still be registered with the failed capture, and would refuse to draw.
                generator = torch.cuda.default_generators[device.index or 0]
                generator.graphsafe_set_state(generator.clone_state())
            cause = " ".join(str(error.__context__ or error).split())[:300]
            name = type(self.model).__name__
            warnings.warn(f"this {name} generates without CUDA graphs, and slower: {cause}", stacklevel=2)
            return None

    def step(self, kind: int) -> Tensor:
        """Run a step of a kind eagerly; this is what is captured."""
        self.state.length = kind
        for place in self.state.places:
            place.begin(kind)
        return self.state.step(self.model, self.tokens_B1)

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat rows and drop the last ones."""
        missing = self.batch_size - order.numel()
        self.state.reorder(torch.cat([order, order.new_zeros(missing)]) if missing else order)
        self.state.batch_size = order.numel()


class Reader:
    """Reads tokens into a state: one by CUDA graphs where possible, several by a forward pass.

    While graphs read, ``state`` falls behind; ``settle`` has it read the tokens since then in one pass.

    ``room`` is the final length of the texts in tokens, 0 if unknown. Raises ValueError as ``takes_graphs`` does.
    """

    def __init__(self, model: Any, state: State, graphs: bool | None = None, room: int = 0) -> None:
        self.model, self.state, self.room = model, state, room
        self.takes_graphs = takes_graphs(model, graphs)
        self.steps: Steps | None = None

    @property
    def length(self) -> int:
        """Tokens read."""
        return self.state.length if self.steps is None else self.steps.length

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Read more tokens, (B, T) -> features (B, T, D), which the next call may overwrite."""
        one_more = tokens_BT.size(1) == 1 and self.length > 0 and not torch.is_grad_enabled()
        if one_more and self.takes_graphs and self.steps is None:
            self._begin()
        if self.steps is None or not one_more or self.steps.length == self.steps.capacity:
            return self.model.features(tokens_BT, self.settle())
        # A copy, since callers may reuse memory.
        self.unread.append(tokens_BT.clone())
        return self.steps(tokens_BT)

    def _begin(self) -> None:
        rows, length = self.state.batch_size, self.state.length
        self.steps = Steps.of(self.model, rows, self.room if self.room > length else 2 * length).begin(self.state)
        # Tokens that only the steps have read, and for each of their rows, the state's row that it continues.
        self.unread: list[Tensor] = []
        self.rows_B = torch.arange(rows, device=self.steps.tokens_B1.device)
        # The model keeps the steps for its next text.
        self.give_back = finalize(self, setattr, self.model, "steps", self.steps)

    @torch.no_grad()
    def settle(self) -> State:
        """The state, brought up to date; the steps go back to the model."""
        if self.steps is not None:
            self.give_back()
            self.steps = None
            self.state.reorder(self.rows_B)
            if self.unread:
                self.model.features(torch.cat(self.unread, dim=1), self.state)
        return self.state

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows."""
        if self.steps is None or order.numel() > self.steps.batch_size:
            self.settle().reorder(order)
            return
        self.steps.reorder(order)
        self.rows_B = self.rows_B.index_select(0, order)
        self.unread = [torch.cat(self.unread, dim=1).index_select(0, order)]

    def copy(self) -> Reader:
        """One that knows the same and shares no memory with this one, so that both can go on."""
        return Reader(self.model, self.settle().copy(), None if self.takes_graphs else False, self.room)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        """As ``copy``: of the same model."""
        return self.copy()
