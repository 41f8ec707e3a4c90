"""What a model loses when its distant context is damaged.

Multi-scale Transformer LMs, Section 5.2, Figure 4; Khandelwal et al., 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_ms.analysis import report
from fairseq_ms.analysis.checkpoints import Checkpoint
from fairseq_ms.analysis.scoring import bootstrap_band, score_windows
from fairseq_ms.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERTURBATIONS = ("shuffle", "reverse", "replace", "drop")


def cut_windows(tokens: Tensor, window: int, limit: int | None) -> Tensor:
    """Consecutive windows (R, window) of a token sequence; with a limit, so many spread evenly over it.

    Raises UsageError when the sequence holds fewer than two windows.
    """
    rows = tokens.numel() // window
    if rows < 2:
        raise UsageError(
            f"--tokens-per-sample must leave at least two windows: {tokens.numel()} tokens hold {rows} of {window}"
        )
    windows = tokens[: rows * window].view(rows, window)
    if limit is None or limit >= rows:
        return windows
    return windows[torch.linspace(0, rows - 1, limit).round().long()]


def perturb(windows_RT: Tensor, length: int, how: str, generator: np.random.Generator) -> Tensor:
    """The first ``length`` tokens of every window (R, length), damaged.

    shuffle: in random order, another for each window; reverse: in reverse; replace: those of another window.
    """
    context = windows_RT[:, :length]
    if how == "reverse":
        return context.flip(1)
    if how == "replace":
        rows = windows_RT.size(0)
        return context[(torch.arange(rows) + int(generator.integers(1, rows))) % rows]
    assert how == "shuffle"
    orders = generator.permuted(np.tile(np.arange(length), (windows_RT.size(0), 1)), axis=1)
    return context.gather(1, torch.from_numpy(orders))


def increase_in_nll(
    checkpoint: Checkpoint, windows_RT: Tensor, length: int, how: str, seed: int, max_tokens: int = 8192
) -> tuple[np.ndarray, np.ndarray]:
    """NLL of the tokens behind the context with it intact (R, T - length), and by how much damage raises it.

    With "drop" the model reads the end-of-sentence symbol and then only what follows the context. Every
    checkpoint is shown the same damage for one seed.
    """
    generator = np.random.default_rng(seed)
    damaged = None if how == "drop" else perturb(windows_RT, length, how, generator)
    intact, raised = [], []
    rows = max(1, max_tokens // windows_RT.size(1))
    for start in range(0, windows_RT.size(0), rows):
        batch = windows_RT[start : start + rows]
        source, target = batch[:, :-1], batch[:, 1:]
        plain = score_windows(checkpoint, source, target, first=length - 1)
        if damaged is None:
            eos = source.new_full((source.size(0), 1), checkpoint.dictionary.eos())
            changed = score_windows(checkpoint, torch.cat([eos, source[:, length:]], 1), target[:, length - 1 :])
        else:
            broken = torch.cat([damaged[start : start + rows], source[:, length:]], 1)
            changed = score_windows(checkpoint, broken, target, first=length - 1)
        intact.append(plain.cpu().double().numpy())
        raised.append(changed.cpu().double().numpy() - intact[-1])
    return np.concatenate(intact), np.concatenate(raised)


class Group(NamedTuple):
    """Distances from ``first`` to ``last``, the mean increase in NLL there, and its band."""

    first: int
    last: int
    increase: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """As JSON files have it."""
        return {"from": self.first, "to": self.last, "increase": self.increase, "low": self.low, "high": self.high}


def distance_groups(distances: int) -> list[tuple[int, int]]:
    """Ranges (first, last) of distances from 1 to ``distances``, each twice as wide as the one before.

    What is left at the end belongs to the last of them if it is less than half as wide as its own would be.
    """
    groups: list[tuple[int, int]] = []
    first = 1
    while first <= distances:
        last = min(2 * first - 1, distances)
        if groups and last - first + 1 < first / 2:
            groups[-1] = (groups[-1][0], last)
        else:
            groups.append((first, last))
        first = last + 1
    return groups


def summarise(raised_RC: np.ndarray, seed: int) -> list[Group]:
    """Mean increase by distance group with its bootstrap band over windows; distance 1 is the first token."""
    groups = distance_groups(raised_RC.shape[1])
    means = np.stack([raised_RC[:, first - 1 : last].mean(1) for first, last in groups], axis=1)
    low, high = bootstrap_band(means, seed)
    return [
        Group(first, last, float(mean), float(bottom), float(top))
        for (first, last), mean, bottom, top in zip(groups, means.mean(0), low, high)
    ]


def draw(figure: Figure, labels: Sequence[str], curves: Sequence[list[Group]], how: str) -> None:
    """Increase in NLL over the distance from the damaged context, with bootstrap bands."""
    axes = figure.add_subplot()
    for index, (label, curve) in enumerate(zip(labels, curves)):
        middles = [(group.first * group.last) ** 0.5 for group in curve]
        line = report.plot_line(axes, index, middles, [group.increase for group in curve], label)
        low, high = [group.low for group in curve], [group.high for group in curve]
        axes.fill_between(middles, low, high, alpha=0.15, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axhline(0.0, color="black", linewidth=0.6)
    report.finish_axes(axes, f"distance from the context ({how}), in tokens", "increase in NLL (nats)")
