"""`fairseq-ms context-window`: what each further token of context is worth (Table 4's last block)."""

from __future__ import annotations

import argparse

from fairseq_ms.analysis import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, contexts and outputs."""
    arguments.add_checkpoints(parser)
    arguments.add_flag(
        parser,
        "--contexts",
        "--context",
        type=arguments.positive_list,
        metavar="N,N,...",
        help="context lengths (default: powers of two up to 512, as far as all the models have positions)",
    )
    arguments.add_flag(
        parser,
        "--limit",
        "--targets",
        type=arguments.positive,
        default=1000,
        metavar="N",
        help="predict N tokens (default: 1000)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the bootstrap (default: 1)")
    arguments.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row a context length, per checkpoint the perplexity and its band."""
    import numpy as np
    import torch

    from fairseq_ms.analysis import checkpoints, report
    from fairseq_ms.analysis.context_window import curve

    report.check_outputs(args.json, args.png)
    loaded = arguments.load_checkpoints(args)
    checkpoints.require_one_dictionary(loaded, args.command)
    most = min(512, *(checkpoint.longest or 512 for checkpoint in loaded))
    contexts = sorted(set(args.contexts or [2**power for power in range(most.bit_length()) if 2**power <= most]))
    for checkpoint in loaded:
        curve.check_contexts(checkpoint, contexts)
    tokens = torch.cat(checkpoints.documents(loaded[0], args.gen_subset))
    targets = curve.choose_targets(tokens.numel(), contexts[-1], args.limit)
    curves = []
    for checkpoint in loaded:
        nll = [curve.nll_with_context(checkpoint, tokens, targets, length, args.max_tokens) for length in contexts]
        curves.append(curve.summarise(np.stack(nll), contexts, args.seed))
    labels = [checkpoint.label for checkpoint in loaded]
    header = ["context", *(column for label in labels for column in (label, "95% band"))]
    rows = []
    for points in zip(*curves):
        cells = [cell for p in points for cell in (p["perplexity"], f"{p['low']:.2f} .. {p['high']:.2f}")]
        rows.append([points[0]["context"], *cells])
    print(
        f"perplexity of the same {len(targets)} tokens, given so many tokens of context; "
        "bands are of the difference to the longest"
    )
    print(report.format_table(header, rows))
    results = [{"label": label, "targets": len(targets), "by_context": points} for label, points in zip(labels, curves)]
    arguments.write_results(args, loaded, results)
    if args.png:
        report.write_png(args.png, lambda figure: curve.draw(figure, labels, curves))
    return 0
