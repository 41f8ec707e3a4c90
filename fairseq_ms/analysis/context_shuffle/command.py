"""`fairseq-ms context-shuffle`: how far back word order matters to a model (Figure 4)."""

from __future__ import annotations

import argparse

from fairseq_ms.analysis import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, damage, window and outputs."""
    arguments.add_checkpoints(parser)
    parser.add_argument(
        "--perturb",
        choices=("shuffle", "reverse", "replace", "drop"),
        default="shuffle",
        help="what happens to the context (default: shuffle)",
    )
    parser.add_argument(
        "--tokens-per-sample",
        type=arguments.positive,
        metavar="N",
        help="window in tokens (default: 512, or as many as all the models have positions for)",
    )
    arguments.add_flag(
        parser,
        "--damaged",
        "--context-window",
        type=arguments.positive,
        metavar="N",
        help="damaged tokens at the beginning of a window (default: half of it)",
    )
    arguments.add_flag(
        parser, "--limit", "--windows", type=arguments.positive, metavar="N", help="use N windows (default: all)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the damage and of the bootstrap (default: 1)")
    arguments.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row a range of distances, per checkpoint the increase and its band."""
    import torch

    from fairseq_ms.analysis import checkpoints, report, scoring
    from fairseq_ms.analysis.context_shuffle import perturbation
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, args.png)
    if args.limit == 1:
        raise UsageError("--limit must be at least 2, since an interval needs several: got 1")
    loaded = arguments.load_checkpoints(args)
    checkpoints.require_one_dictionary(loaded, args.command)
    window = args.tokens_per_sample or min(512, *(checkpoint.longest or 512 for checkpoint in loaded))
    length = args.damaged or window // 2
    for checkpoint in loaded:
        scoring.check_window(checkpoint, window, None)
    if not 1 <= length < window:
        raise UsageError(f"--damaged must be at least 1 and below the window of {window}: got {length}")
    tokens = torch.cat(checkpoints.documents(loaded[0], args.gen_subset))
    windows = perturbation.cut_windows(tokens, window, args.limit)
    results, curves = [], []
    for checkpoint in loaded:
        intact, raised = perturbation.increase_in_nll(
            checkpoint, windows, length, args.perturb, args.seed, args.max_tokens
        )
        curves.append(perturbation.summarise(raised, args.seed))
        results.append(
            {
                "label": checkpoint.label,
                "windows": len(windows),
                "intact_nll": float(intact.mean()),
                "by_distance": [group.as_dict() for group in curves[-1]],
                "every_distance": raised.mean(0),
            }
        )
    labels = [checkpoint.label for checkpoint in loaded]
    header = ["distance", *(column for label in labels for column in (label, "95% band"))]
    rows = []
    for groups in zip(*curves):
        cells = [
            cell for group in groups for cell in (round(group.increase, 4), f"{group.low:.4f} .. {group.high:.4f}")
        ]
        rows.append([f"{groups[0].first}-{groups[0].last}", *cells])
    print(f"{args.perturb}: first {length} of {window} tokens, {len(windows)} windows, increase in NLL (nats)")
    print(report.format_table(header, rows))
    arguments.write_results(args, loaded, results)
    if args.png:
        report.write_png(args.png, lambda figure: perturbation.draw(figure, labels, curves, args.perturb))
    return 0
