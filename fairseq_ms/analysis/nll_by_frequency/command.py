"""`fairseq-ms nll-by-frequency`: which tokens a model is better at (Figures 5 and 6)."""

from __future__ import annotations

import argparse

from fairseq_ms.commands import shared

NAME = "nll-by-frequency"
HELP = "mean NLL of tokens in bins of equal training frequency, rarest first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, window, bins and outputs."""
    shared.add_checkpoints(parser)
    shared.add_window(parser)
    parser.add_argument("--bins", type=shared.positive, default=10, metavar="N", help="number of bins (default: 10)")
    parser.add_argument("--train-subset", default="train", help="split whose frequencies count (default: train)")
    parser.add_argument("--limit", type=shared.positive, metavar="N", help="score only the first N tokens")
    shared.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row a bin, one column a checkpoint."""
    import math

    import torch

    from fairseq_ms.analysis import checkpoints, frequency, report, scoring

    report.check_outputs(args.json, args.png)
    loaded = shared.load_checkpoints(args)
    shared.check_window_is_used(args, loaded)
    checkpoints.require_one_dictionary(loaded, NAME)
    counts = checkpoints.token_counts(loaded[0], args.train_subset)
    frequency.check_bins(args.bins, counts)
    bins = frequency.frequency_bins(counts, args.bins)
    results = frequency.describe_bins(counts, bins, args.bins)
    curves = []
    for checkpoint in loaded:
        texts = checkpoints.documents(checkpoint, args.gen_subset, args.limit)
        nll = scoring.score_documents(checkpoint, texts, args.tokens_per_sample, args.context_window, args.max_tokens)
        scored, means = frequency.nll_by_bin(torch.cat(texts).numpy(), nll, bins, args.bins)
        curves.append([None if math.isnan(mean) else float(mean) for mean in means])
        for row, tokens, mean in zip(results, scored, curves[-1]):
            row["tokens"] = int(tokens)
            row.setdefault("nll", {})[checkpoint.label] = mean
    labels = [checkpoint.label for checkpoint in loaded]
    rows = [
        [row["bin"], row["symbols"], f"{row['least_frequent']}-{row['most_frequent']}", row["tokens"]]
        + [row["nll"][label] for label in labels]
        for row in results
    ]
    print(report.format_table(["bin", "symbols", "training count", "tokens scored", *labels], rows))
    shared.write_results(args, NAME, loaded, results)
    if args.png:
        report.write_png(args.png, lambda figure: frequency.draw(figure, labels, curves))
    return 0
