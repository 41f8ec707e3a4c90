"""Random cases by seed."""

from typing import Any

import pytest


def seeds(first: int, count: int) -> list[Any]:
    """``range(count)`` for ``parametrize``; `make test` takes the ``first`` of them."""
    return [*range(first), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(first, count))]
