"""NLL by how frequent a token is in the training text (Multi-scale Transformer LMs, Section 6.1, Figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fairseq_ms.analysis import report
from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def frequency_bins(counts_V: np.ndarray, bins: int) -> np.ndarray:
    """The bin (V,) of every symbol, 0 for the rarest, such that each bin has an equal share of the text.

    Symbols are ordered by how often they occur (equally frequent ones by number), and a symbol belongs to
    the bin in which the middle of its occurrences lies. Symbols that never occur are in bin 0.
    """
    order = np.lexsort((np.arange(counts_V.size), counts_V))
    ordered = counts_V[order].astype(np.float64)
    middles = ordered.cumsum() - ordered / 2
    total = max(1.0, ordered.sum())
    assigned = np.empty(counts_V.size, dtype=np.int64)
    assigned[order] = np.minimum((middles * bins / total).astype(np.int64), bins - 1)
    return assigned


def nll_by_bin(tokens_n: np.ndarray, nll_n: np.ndarray, bins_V: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """How many of the scored tokens are in each bin (bins,), and their mean NLL (bins,), NaN where none is."""
    of_token = bins_V[tokens_n]
    scored = np.bincount(of_token, minlength=bins)
    sums = np.bincount(of_token, weights=nll_n, minlength=bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        return scored, sums / scored


def describe_bins(counts_V: np.ndarray, bins_V: np.ndarray, bins: int) -> list[dict[str, int]]:
    """Per bin: symbols, training occurrences, and the counts of its rarest and most frequent symbol."""
    described = []
    for index in range(bins):
        inside = counts_V[(bins_V == index) & (counts_V > 0)]
        described.append(
            {
                "bin": index + 1,
                "symbols": int(inside.size),
                "train_tokens": int(inside.sum()),
                "least_frequent": int(inside.min()) if inside.size else 0,
                "most_frequent": int(inside.max()) if inside.size else 0,
            }
        )
    return described


def check_bins(bins: int, counts_V: np.ndarray) -> None:
    """Raise UsageError when the text cannot be cut into so many bins."""
    kinds = int((counts_V > 0).sum())
    if not 1 <= bins <= kinds:
        raise UsageError(f"--bins must lie between 1 and the {kinds} symbols of the training text: got {bins}")


def draw(figure: Figure, labels: Sequence[str], nll: Sequence[Sequence[float | None]]) -> None:
    """Mean NLL over bins, rarest left, one line a checkpoint."""
    axes = figure.add_subplot()
    positions = list(range(1, len(nll[0]) + 1))
    for index, (label, values) in enumerate(zip(labels, nll)):
        heights = [np.nan if value is None else value for value in values]
        report.plot_line(axes, index, positions, heights, label)
    axes.set_xticks(positions)
    report.finish_axes(axes, "bin of equal training frequency (1: rarest tokens)", "mean NLL (nats)")
