"""CUDA graphs without a GPU: what is captured is every operation, and a replay runs all of them again.

As on a GPU, a replay runs no Python of the step: it reads and writes the memory that the capture has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph(TorchDispatchMode):
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict[str, Any], Any]] = []
        # The operations of a capture have run here, as they do not on a GPU, so its first replay has nothing to do.
        self.has_run = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run what was captured."""
        if not self.has_run:
            for func, args, kwargs, result in self.calls:
                for kept, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)
        self.has_run = False


class Device:
    """What is current on a device, and which captures there were: of each its device, stream, pool and mode.

    Attributes:
        fails: whether captures fail; as with torch, their stream then stays the current one
        most: how many captures there were at a time
    """

    def __init__(self) -> None:
        self.device: Any = "cuda:0"
        self.stream: Any = "usual"
        self.captures: list[tuple[Any, Any, Any, str]] = []
        self.fails = False
        self.underway = self.most = 0

    @contextmanager
    def on(self, name: str, value: Any) -> Iterator[None]:
        """``torch.cuda.device`` and ``torch.cuda.stream``."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    @contextmanager
    def capture(
        self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """``torch.cuda.graph``."""
        self.captures.append((self.device, stream, pool, capture_error_mode))
        self.underway += 1
        self.most = max(self.most, self.underway)
        before, self.stream = self.stream, stream
        try:
            if self.fails:
                raise RuntimeError("operation not permitted when stream is capturing")
            with graph:
                yield
        finally:
            self.underway -= 1
        self.stream = before


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Steps are captured and replayed: on the GPU under test, or as recorded operations without one."""
    device = Device()
    if torch.empty(0).device.type != "cuda":
        monkeypatch.setattr("fairseq_ms.core.steps.replay.has_graphs", lambda device: True)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", device.capture)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"captures of {device}")
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "device", lambda value: device.on("device", value))
        monkeypatch.setattr(torch.cuda, "stream", lambda value: device.on("stream", value))
    return device
