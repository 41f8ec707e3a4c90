"""Which numbers of layers at which scales fit into a memory budget (Sections 3.5 and 5.3, Table 4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fairseq_ms.errors import UsageError

Layers = Mapping[int, int]


@dataclass(frozen=True)
class Allocation:
    """Layers by scale, and the bytes of a training step with them."""

    layers: dict[int, int]
    bytes: float

    def __str__(self) -> str:
        """As ``--scale-layers`` is written, coarsest scale first."""
        return ",".join(f"{scale}x={count}" for scale, count in sorted(self.layers.items(), reverse=True))


def preference(layers: Layers) -> tuple[int, ...]:
    """Greater is better: layers at the finest scale count first, then those at the next one, and so on.

    This is the order of the paper's ablation of capacity (Table 4): perplexity falls as layers move to finer
    scales, whatever becomes of the total.
    """
    return tuple(layers[scale] for scale in sorted(layers))


def fit(
    footprint: Callable[[Layers], float], scales: Sequence[int], budget: float, most: int, count: int
) -> list[Allocation]:
    """The ``count`` best allocations of 1 to ``most`` layers a scale that take at most ``budget`` bytes.

    ``footprint`` must grow by the same number of bytes with every further layer of a scale, as memory does.
    Raises UsageError when not even one layer a scale fits.
    """
    smallest = dict.fromkeys(scales, 1)
    base = footprint(smallest)
    if base > budget:
        raise UsageError(
            f"--fit must leave room for one layer a scale, which takes {base / 2**30:.2f} GiB: got {budget / 2**30:g}"
        )
    cost = {scale: footprint({**smallest, scale: 2}) - base for scale in scales}
    found = []
    for counts in itertools.product(range(most, 0, -1), repeat=len(scales)):
        layers = dict(zip(sorted(scales), counts))
        total = base + sum((layers[scale] - 1) * cost[scale] for scale in scales)
        if total <= budget:
            found.append(Allocation(layers, total))
            if len(found) == count:
                break
    return found
