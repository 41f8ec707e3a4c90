"""`fairseq-ms context-shuffle`: how far back word order matters to a model (Figure 4)."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq_ms.commands import shared

NAME = "context-shuffle"
HELP = "increase in NLL when the distant context is shuffled, reversed, replaced or dropped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, damage, window and outputs."""
    shared.add_checkpoints(parser)
    parser.add_argument(
        "--perturb",
        choices=("shuffle", "reverse", "replace", "drop"),
        default="shuffle",
        help="what happens to the context (default: shuffle)",
    )
    parser.add_argument(
        "--tokens-per-sample",
        type=shared.positive,
        metavar="N",
        help="window in tokens (default: 512, or as many as all the models have positions for)",
    )
    parser.add_argument(
        "--context-window",
        type=shared.positive,
        metavar="N",
        help="damaged tokens at the beginning of a window (default: half of it)",
    )
    parser.add_argument("--windows", type=shared.positive, metavar="N", help="use N windows (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the damage and of the bootstrap (default: 1)")
    shared.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row a range of distances, per checkpoint the increase and its band."""
    import torch

    from fairseq_ms.analysis import checkpoints, perturbation, report, scoring
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, args.png)
    loaded = shared.load_checkpoints(args)
    checkpoints.require_one_dictionary(loaded, NAME)
    window = args.tokens_per_sample or min(512, *(checkpoint.longest or 512 for checkpoint in loaded))
    length = args.context_window or window // 2
    for checkpoint in loaded:
        scoring.check_window(checkpoint, window, None)
    if not 1 <= length < window:
        raise UsageError(f"--context-window must be at least 1 and below the window of {window}: got {length}")
    tokens = torch.cat(checkpoints.documents(loaded[0], args.gen_subset))
    windows = perturbation.cut_windows(tokens, window, args.windows)
    results: list[dict[str, Any]] = []
    for checkpoint in loaded:
        intact, raised = perturbation.increase_in_nll(
            checkpoint, windows, length, args.perturb, args.seed, args.max_tokens
        )
        results.append(
            {
                "label": checkpoint.label,
                "windows": len(windows),
                "intact_nll": float(intact.mean()),
                "by_distance": perturbation.summarise(raised, args.seed),
                "every_distance": raised.mean(0),
            }
        )
    labels = [checkpoint.label for checkpoint in loaded]
    header = ["distance", *(column for label in labels for column in (label, "95% band"))]
    rows = []
    for groups in zip(*(result["by_distance"] for result in results)):
        cells = [
            cell
            for group in groups
            for cell in (round(group["increase"], 4), f"{group['low']:.4f} .. {group['high']:.4f}")
        ]
        rows.append([f"{groups[0]['from']}-{groups[0]['to']}", *cells])
    print(f"{args.perturb}: first {length} of {window} tokens, {len(windows)} windows, increase in NLL (nats)")
    print(report.format_table(header, rows))
    shared.write_results(args, NAME, loaded, results)
    if args.png:
        curves = [result["by_distance"] for result in results]
        report.write_png(args.png, lambda figure: perturbation.draw(figure, labels, curves, args.perturb))
    return 0
