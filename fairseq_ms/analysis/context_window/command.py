"""`fairseq-ms context-window`: what each further token of context is worth (Table 4's last block)."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq_ms.commands import shared

NAME = "context-window"
HELP = "perplexity against the number of context tokens a model is given"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoints, contexts and outputs."""
    shared.add_checkpoints(parser)
    parser.add_argument(
        "--context",
        type=shared.positive_list,
        metavar="N,N,...",
        help="context lengths (default: powers of two up to 512, as far as all the models have positions)",
    )
    parser.add_argument(
        "--targets", type=shared.positive, default=1000, metavar="N", help="tokens to predict (default: 1000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the bootstrap (default: 1)")
    shared.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print one row a context length, per checkpoint the perplexity and its band."""
    import numpy as np
    import torch

    from fairseq_ms.analysis import checkpoints, context, report

    report.check_outputs(args.json, args.png)
    loaded = shared.load_checkpoints(args)
    checkpoints.require_one_dictionary(loaded, NAME)
    most = min(512, *(checkpoint.longest or 512 for checkpoint in loaded))
    contexts = sorted(set(args.context or [2**power for power in range(most.bit_length()) if 2**power <= most]))
    for checkpoint in loaded:
        context.check_contexts(checkpoint, contexts)
    tokens = torch.cat(checkpoints.documents(loaded[0], args.gen_subset))
    targets = context.choose_targets(tokens.numel(), contexts[-1], args.targets)
    results: list[dict[str, Any]] = []
    for checkpoint in loaded:
        nll = [context.nll_with_context(checkpoint, tokens, targets, length, args.max_tokens) for length in contexts]
        curve = context.summarise(np.stack(nll), contexts, args.seed)
        results.append({"label": checkpoint.label, "targets": len(targets), "by_context": curve})
    labels = [checkpoint.label for checkpoint in loaded]
    header = ["context", *(column for label in labels for column in (label, "95% band"))]
    rows = []
    for points in zip(*(result["by_context"] for result in results)):
        cells = [cell for p in points for cell in (p["perplexity"], f"{p['low']:.2f} .. {p['high']:.2f}")]
        rows.append([points[0]["context"], *cells])
    print(
        f"perplexity of the same {len(targets)} tokens, given so many tokens of context; "
        "bands are of the difference to the longest"
    )
    print(report.format_table(header, rows))
    shared.write_results(args, NAME, loaded, results)
    if args.png:
        curves = [result["by_context"] for result in results]
        report.write_png(args.png, lambda figure: context.draw(figure, labels, curves))
    return 0
