"""Perplexity against the number of context tokens a model is given.

Multi-scale Transformer LMs, Section 5.3, Table 4's last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor

from fairseq_ms.analysis import report
from fairseq_ms.analysis.checkpoints import Checkpoint
from fairseq_ms.analysis.scoring import bootstrap_band, score_windows
from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(TypedDict):
    """A number of context tokens, the mean NLL given so many, and the perplexity with its band."""

    context: int
    nll: float
    perplexity: float
    low: float
    high: float


def choose_targets(length: int, most: int, count: int) -> np.ndarray:
    """Positions of up to ``count`` tokens, evenly spread, that have ``most`` tokens before them.

    Raises UsageError when there is none.
    """
    if length <= most:
        raise UsageError(f"--contexts must be shorter than the split, which has {length} tokens: got {most}")
    return np.unique(np.linspace(most, length - 1, min(count, length - most)).round().astype(np.int64))


def nll_with_context(
    checkpoint: Checkpoint, tokens: Tensor, targets: np.ndarray, context: int, max_tokens: int = 8192
) -> np.ndarray:
    """NLL (targets,) of the tokens at the positions ``targets``, the model reading only the last ``context``."""
    offsets = torch.arange(-context, 0)
    positions = torch.from_numpy(targets)
    rows = max(1, max_tokens // context)
    parts = []
    for chunk in positions.split(rows):
        source = tokens[chunk[:, None] + offsets]
        target = tokens[chunk[:, None] + offsets + 1]
        parts.append(score_windows(checkpoint, source, target, first=context - 1)[:, 0].cpu())
    return torch.cat(parts).double().numpy()


def check_contexts(checkpoint: Checkpoint, contexts: Sequence[int]) -> None:
    """Raise UsageError on a context that the model cannot be given."""
    for context in contexts:
        if context < 1 or (checkpoint.longest is not None and context > checkpoint.longest):
            raise UsageError(
                f"--contexts must lie between 1 and the {checkpoint.longest} positions of {checkpoint.label}: "
                f"got {context}"
            )


def summarise(nll_CR: np.ndarray, contexts: Sequence[int], seed: int) -> list[Point]:
    """Perplexity by context, the longest last; nll (contexts, targets).

    The bootstrap band is that of the difference to the longest context, target by target: how much more the
    model has to gain is known far better than how hard these targets are.
    """
    low, high = bootstrap_band((nll_CR - nll_CR[-1]).T, seed)
    longest = nll_CR[-1].mean()
    return [
        {
            "context": context,
            "nll": float(mean),
            "perplexity": float(np.exp(mean)),
            "low": float(np.exp(longest + bottom)),
            "high": float(np.exp(longest + top)),
        }
        for context, mean, bottom, top in zip(contexts, nll_CR.mean(1), low, high)
    ]


def draw(figure: Figure, labels: Sequence[str], curves: Sequence[list[Point]]) -> None:
    """Perplexity over the number of context tokens, with the bands of the difference to the longest."""
    axes = figure.add_subplot()
    for index, (label, curve) in enumerate(zip(labels, curves)):
        contexts = [point["context"] for point in curve]
        line = report.plot_line(axes, index, contexts, [point["perplexity"] for point in curve], label)
        low, high = [point["low"] for point in curve], [point["high"] for point in curve]
        axes.fill_between(contexts, low, high, alpha=0.15, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    report.finish_axes(axes, "context given, in tokens", "perplexity")
