"""Replacing a function of fairseq by one around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def wrap(owner: type | ModuleType, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, ...)``; wrapping it again in the same does nothing."""
    original = getattr(owner, name)
    arounds = getattr(original, "arounds", ())
    if around in arounds:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **settings: Any) -> Any:
        return around(original, *args, **settings)

    wrapped.arounds = (*arounds, around)  # type: ignore[attr-defined]
    static = isinstance(vars(owner).get(name), staticmethod)
    setattr(owner, name, staticmethod(wrapped) if static else wrapped)
