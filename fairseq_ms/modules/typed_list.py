"""``nn.ModuleList`` that says what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar, cast

from torch import nn

M = TypeVar("M", bound=nn.Module)


class TypedList(nn.ModuleList, Generic[M]):
    """Modules of one class; the names of its parameters are those of an ``nn.ModuleList``."""

    def __init__(self, modules: Iterable[M] = ()) -> None:
        super().__init__(modules)

    def __iter__(self) -> Iterator[M]:
        return cast("Iterator[M]", super().__iter__())

    def at(self, index: int) -> M:
        """The module of this index."""
        return cast("M", self[index])
