"""``nn.ModuleList`` that says what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


class TypedList(nn.ModuleList, Generic[M]):
    """Modules of one class; the names of its parameters are those of an ``nn.ModuleList``."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[M] = ()) -> None: ...

        def __iter__(self) -> Iterator[M]: ...
