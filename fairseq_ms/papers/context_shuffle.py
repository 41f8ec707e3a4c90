"""Increase in NLL when the distant context is shuffled, reversed, replaced or dropped.

Multi-scale Transformer LMs, Section 5.2, Figure 4; Khandelwal et al., 2018.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import comparison, report
from fairseq_ms.tools.arguments import add_choice, add_counts, add_outputs, add_scored, add_seed

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_ms.tools.checkpoints import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    kinds = ("shuffle", "reverse", "replace", "drop")
    add_choice(parser, "--perturb", kinds, "what happens to the context")
    add_counts(
        parser,
        ("--tokens-per-sample", None, "window (default: 512, or as many as all the models have positions for)"),
        ("--damaged --context-window", None, "damaged tokens at the beginning of a window (default: half of it)"),
        ("--limit --windows", None, "use N windows (default: all)"),
    )
    add_seed(parser, "the damage and of the bootstrap")
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    """Print one row a range of distances, per checkpoint the increase and its band."""
    if args.limit == 1:
        raise UsageError("--limit must be at least 2, since an interval needs several: got 1")
    loaded = comparison.load(args)
    window = args.tokens_per_sample or min(512, *(checkpoint.longest or 512 for checkpoint in loaded))
    length = args.damaged or window // 2
    for checkpoint in loaded:
        checkpoint.check_fits("--tokens-per-sample", window)
    if not 1 <= length < window:
        raise UsageError(f"--damaged must be at least 1 and below the window of {window}: got {length}")
    tokens = loaded[0].text(args.gen_subset)
    windows = cut_windows(tokens, window, args.limit)
    groups = distance_groups(window - length)
    bands, results = {}, []
    for checkpoint in loaded:
        intact, raised = increase_in_nll(checkpoint, windows, length, args.perturb, args.seed, args.max_tokens)
        # By range of distances, of which 1 is that of the first token.
        means_RG = np.stack([raised[:, first - 1 : last].mean(1) for first, last in groups], axis=1)
        bands[checkpoint.label] = band = (means_RG.mean(0), *comparison.bootstrap_band(means_RG, args.seed))
        rows = [(*span, *row) for span, *row in zip(groups, *(values.tolist() for values in band))]
        by_distance = [dict(zip(("from", "to", "increase", "low", "high"), row)) for row in rows]
        found = {"label": checkpoint.label, "windows": len(windows), "intact_nll": float(intact.mean())}
        results.append({**found, "by_distance": by_distance, "every_distance": raised.mean(0)})
    print(f"{args.perturb}: first {length} of {window} tokens, {len(windows)} windows, increase in NLL (nats)")
    print(comparison.band_table("distance", [f"{first}-{last}" for first, last in groups], bands, 4))

    def draw(figure: report.Figure) -> None:
        """Increase in NLL over the distance from the damaged context."""
        middles = [(first * last) ** 0.5 for first, last in groups]
        labels = (f"distance from the context ({args.perturb}), in tokens", "increase in NLL (nats)")
        comparison.draw_bands(figure, middles, bands, *labels)
        figure.axes[0].axhline(0.0, color="black", linewidth=0.6)

    comparison.write(args, loaded, results, draw)


def cut_windows(tokens: Tensor, window: int, limit: int | None) -> Tensor:
    """Consecutive windows (R, window) of a token sequence; with a limit, so many spread evenly over it.

    Raises UsageError when the sequence holds fewer than two windows.
    """
    import torch

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
    import torch

    context = windows_RT[:, :length]
    if how == "reverse":
        return context.flip(1)
    if how == "replace":
        return context.roll(-int(generator.integers(1, len(context))), dims=0)
    assert how == "shuffle"
    orders = generator.permuted(np.tile(np.arange(length), (len(context), 1)), axis=1)
    return context.gather(1, torch.from_numpy(orders))


def increase_in_nll(
    checkpoint: Checkpoint, windows_RT: Tensor, length: int, how: str, seed: int, max_tokens: int = 8192
) -> tuple[np.ndarray, np.ndarray]:
    """NLL of the tokens after the context with it intact (R, T - length), and by how much damage raises it.

    With "drop" the model reads the end-of-sentence symbol and then only what follows the context. Every
    checkpoint is shown the same damage for one seed.
    """
    import torch

    from fairseq_ms.tools import scoring

    if how == "drop":
        damaged = windows_RT.new_full((len(windows_RT), 1), checkpoint.dictionary.eos())
    else:
        damaged = perturb(windows_RT, length, how, np.random.default_rng(seed))
    read = damaged.size(1)
    parts = []
    rows = max(1, max_tokens // windows_RT.size(1))
    for whole, broken in zip(windows_RT.split(rows), damaged.split(rows)):
        source, target = whole[:, :-1], whole[:, 1:]
        intact = scoring.score_windows(checkpoint, source, target, first=length - 1).cpu().double()
        source, target = torch.cat([broken, source[:, length:]], 1), target[:, length - read :]
        changed = scoring.score_windows(checkpoint, source, target, first=read - 1).cpu().double()
        parts.append(torch.stack([intact, changed - intact]))
    intact, raised = torch.cat(parts, dim=1).numpy()
    return intact, raised


def distance_groups(distances: int) -> list[tuple[int, int]]:
    """Ranges (first, last) of distances from 1 to ``distances``, each twice as wide as the one before.

    What is left at the end belongs to the last of them if it is less than half as wide as its own would be.
    """
    starts = [2**power for power in range(distances.bit_length())]
    if len(starts) > 1 and distances - starts[-1] + 1 < starts[-1] / 2:
        starts.pop()
    return [(first, 2 * first - 1) for first in starts[:-1]] + [(starts[-1], distances)]
