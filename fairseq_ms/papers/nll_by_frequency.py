"""Mean NLL of tokens in bins of equal training frequency, rarest first.

Multi-scale Transformer LMs, Figures 5 and 6.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import comparison, report
from fairseq_ms.tools.arguments import add_counts, add_outputs, add_scored, add_window


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    add_window(parser)
    add_counts(parser, ("--bins", 10, "number of bins"), ("--limit", None, "score only the first N tokens"))
    parser.add_argument("--train-subset", default="train", help="split whose frequencies count (default: train)")
    add_outputs(parser)


def run(args: argparse.Namespace) -> None:
    """Print one row a bin: a column a checkpoint, and how far all others are from the first."""
    from fairseq_ms.tools import scoring

    loaded = comparison.load(args)
    counts = loaded[0].token_counts(args.train_subset)
    kinds = int((counts > 0).sum())
    if args.bins > kinds:
        raise UsageError(f"--bins must lie between 1 and the {kinds} symbols of the training text: got {args.bins}")
    bins_V = frequency_bins(counts, args.bins)
    curves: dict[str, list[float | None]] = {}
    differences: dict[str, list[tuple[float, float, float] | None]] = {}
    first: np.ndarray | None = None
    for checkpoint in loaded:
        texts = checkpoint.documents(args.gen_subset, args.limit)
        nll = scoring.score_documents(checkpoint, texts, args.tokens_per_sample, args.context_window, args.max_tokens)
        tokens_n = np.concatenate([text.numpy() for text in texts])
        scored, means = nll_by_bin(tokens_n, nll, bins_V, args.bins)
        if first is None:
            first = nll
        else:
            differences[checkpoint.label] = differences_by_bin(tokens_n, nll - first, bins_V, args.bins)
        curves[checkpoint.label] = [None if math.isnan(mean) else float(mean) for mean in means]
    rows, results = [], []
    # The tokens scored are the same for all checkpoints.
    for index, (tokens, *nlls) in enumerate(zip(scored.tolist(), *curves.values())):
        inside = counts[(bins_V == index) & (counts > 0)]
        span = {"least_frequent": int(inside.min(initial=counts.max())), "most_frequent": int(inside.max(initial=0))}
        counted = "{least_frequent}-{most_frequent}".format(**span)
        apart = {label: found[index] for label, found in differences.items()}
        shown = [band and "{:+.4f} ({:+.4f} to {:+.4f})".format(*band) for band in apart.values()]
        rows.append([index + 1, inside.size, counted, tokens, *nlls, *shown])
        found = {"bin": index + 1, "symbols": inside.size, "train_tokens": int(inside.sum()), **span, "tokens": tokens}
        results.append({**found, "nll": dict(zip(curves, nlls)), "difference": apart})
    header = [f"{label} - {loaded[0].label}" for label in differences]
    print(report.format_table(["bin", "symbols", "training count", "tokens scored", *curves, *header], rows))
    if differences:
        print("differences with their 95% intervals, over tokens")
    comparison.write(args, loaded, results, lambda figure: draw(figure, curves))


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


def differences_by_bin(
    tokens_n: np.ndarray, more_n: np.ndarray, bins_V: np.ndarray, bins: int
) -> list[tuple[float, float, float] | None]:
    """By bin, the mean of differences in NLL and the ends of its 95% interval, over tokens; None for fewer than two."""
    of_token = bins_V[tokens_n]
    found: list[tuple[float, float, float] | None] = []
    for index in range(bins):
        inside = more_n[of_token == index]
        if inside.size < 2:
            found.append(None)
            continue
        mean, half = float(inside.mean()), 1.96 * float(inside.std(ddof=1)) / math.sqrt(inside.size)
        found.append((mean, mean - half, mean + half))
    return found


def draw(figure: report.Figure, curves: Mapping[str, Sequence[float | None]]) -> None:
    """Mean NLL over bins, rarest left, one line a checkpoint."""
    axes = figure.add_subplot()
    lines = {
        label: [(bin, math.nan if value is None else value) for bin, value in enumerate(values, 1)]
        for label, values in curves.items()
    }
    report.plot_panel(axes, lines, "bin of equal training frequency (1: rarest tokens)", "mean NLL (nats)")
    axes.set_xticks(range(1, max(map(len, curves.values())) + 1))
