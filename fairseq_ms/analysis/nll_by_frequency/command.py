"""`fairseq-ms nll-by-frequency`: which tokens a model is better at (Figures 5 and 6)."""

from __future__ import annotations

import argparse

from fairseq_ms.analysis import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, window, bins and outputs."""
    arguments.add_checkpoints(parser)
    arguments.add_window(parser)
    parser.add_argument("--bins", type=arguments.positive, default=10, metavar="N", help="number of bins (default: 10)")
    parser.add_argument("--train-subset", default="train", help="split whose frequencies count (default: train)")
    parser.add_argument("--limit", type=arguments.positive, metavar="N", help="score only the first N tokens")
    arguments.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row a bin, one column a checkpoint."""
    import math

    import torch

    from fairseq_ms.analysis import checkpoints, report, scoring
    from fairseq_ms.analysis.nll_by_frequency import bins

    report.check_outputs(args.json, args.png)
    loaded = arguments.load_checkpoints(args)
    arguments.check_window_is_used(args, loaded)
    checkpoints.require_one_dictionary(loaded, args.command)
    counts = checkpoints.token_counts(loaded[0], args.train_subset)
    bins.check_bins(args.bins, counts)
    bins_V = bins.frequency_bins(counts, args.bins)
    described = bins.describe_bins(counts, bins_V, args.bins)
    curves = []
    for checkpoint in loaded:
        texts = checkpoints.documents(checkpoint, args.gen_subset, args.limit)
        nll = scoring.score_documents(checkpoint, texts, args.tokens_per_sample, args.context_window, args.max_tokens)
        scored, means = bins.nll_by_bin(torch.cat(texts).numpy(), nll, bins_V, args.bins)
        curves.append([None if math.isnan(mean) else float(mean) for mean in means])
    labels = [checkpoint.label for checkpoint in loaded]
    rows, results = [], []
    # The tokens scored are the same for all checkpoints.
    for row, tokens, *nlls in zip(described, scored.tolist(), *curves):
        span = f"{row['least_frequent']}-{row['most_frequent']}"
        rows.append([row["bin"], row["symbols"], span, tokens, *nlls])
        results.append({**row, "tokens": tokens, "nll": dict(zip(labels, nlls))})
    print(report.format_table(["bin", "symbols", "training count", "tokens scored", *labels], rows))
    arguments.write_results(args, loaded, results)
    if args.png:
        report.write_png(args.png, lambda figure: bins.draw(figure, labels, curves))
    return 0
