"""`fairseq-ms plot`: figures of measurements that stand by themselves, and of what a model attends to."""

from __future__ import annotations

import argparse

from fairseq_ms.analysis import arguments

# Those that attention is drawn of.
TAKES_FAIRSEQ_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which figure, and its measurements' sizes."""
    parser.add_argument(
        "figure",
        choices=("context", "attention"),
        help="context: Transformer-XL and Transformer-QL (Section 2.4); attention: what a model of the multi-scale "
        "paper (--arch ARCH and fairseq's flags) reads at each scale (Figure 1)",
    )
    parser.add_argument(
        "--tokens", type=arguments.positive, default=64, metavar="N", help="attention: of a row (default: 64)"
    )
    parser.add_argument(
        "--segments",
        type=arguments.positive_list,
        default=[4, 8, 16, 32, 64],
        metavar="N,N,...",
        help="segment lengths, multiples of 4; the memory is as long (default: 4,8,16,32,64)",
    )
    parser.add_argument(
        "--dim", type=arguments.positive, default=256, metavar="N", help="model dimension (default: 256)"
    )
    parser.add_argument("--streams", type=arguments.positive, default=8, metavar="N", help="batch size (default: 8)")
    parser.add_argument("--rounds", type=arguments.positive, default=5, metavar="N", help="timed steps (default: 5)")
    arguments.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write what was asked for."""
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.plot import context_growth
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, args.png)
    if args.figure == "attention":
        return _attention(args)
    if args.fairseq_flags:
        raise UsageError(f"plot context has sizes of its own and takes no flags of fairseq's: got {args.fairseq_flags}")
    if any(segment % 4 for segment in args.segments):
        raise UsageError(f"--segments must be multiples of 4, the coarsest scale: got {args.segments}")
    if args.dim % 2 or (args.dim > 64 and args.dim % 64):
        raise UsageError(f"--dim must be even, and a multiple of 64 above that: got {args.dim}")
    arguments.quieten()
    curves = context_growth.measure(sorted(set(args.segments)), args.dim, args.streams, args.rounds)
    print(f"one segment of one stream, d = {args.dim}, {args.streams} streams a step, segment and memory equally long")
    header = ["model", "segment", "average context", "MB kept", "ms a step"]
    print(report.format_table(header, context_growth.rows(curves)))
    if args.json:
        sizes = {"dim": args.dim, "streams": args.streams, "rounds": args.rounds}
        report.write_json(args.json, {"command": args.command, **sizes, "curves": context_growth.as_json(curves)})
    if args.png:
        report.write_png(args.png, lambda figure: context_growth.draw(figure, curves), width=10)
    return 0


def _attention(args: argparse.Namespace) -> int:
    """Print how much every scale reads, and draw it."""
    from fairseq_ms.analysis import report, untrained
    from fairseq_ms.analysis.plot import attention

    model, _ = untrained.build(args.fairseq_flags, 1000, on_meta=True)
    seen = attention.tokens_seen(model, args.tokens)
    print(f"what outputs read through attention in {args.tokens} tokens")
    header = ["scale", "tokens, last output", "positions, last output", "pairs in all"]
    print(report.format_table(header, attention.rows(seen)))
    if args.json:
        scales = {f"{scale}x": mask.int().tolist() for scale, mask in seen.items()}
        report.write_json(args.json, {"command": args.command, "tokens": args.tokens, "scales": scales})
    if args.png:
        panels = len(seen) + (len(seen) > 1)
        report.write_png(
            args.png, lambda figure: attention.draw(figure, seen), width=max(4.0, 3.0 * panels), height=3.6
        )
    return 0
