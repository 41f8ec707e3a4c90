"""`fairseq-ms plot`: figures that need no checkpoint."""

from __future__ import annotations

import argparse

from fairseq_ms.analysis import arguments

TAKES_FAIRSEQ_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which figure, and what it asks for."""
    figures = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    attention = figures.add_parser(
        "attention",
        help="which blocks a multi-scale model looks at (Multi-scale Transformer LMs, Figure 1)",
        usage="fairseq-ms plot attention --arch ARCH [FLAGS OF FAIRSEQ-TRAIN ...] --png FILE [OPTIONS]",
        allow_abbrev=False,
    )
    attention.add_argument(
        "--length", type=arguments.positive, default=48, metavar="N", help="tokens of the text (default: 48)"
    )
    arguments.add_outputs(attention)
    context = figures.add_parser(
        "context",
        help="what a training step keeps and takes against context length (Transformer-QL, Section 2.4)",
        allow_abbrev=False,
    )
    context.add_argument(
        "--segments",
        type=arguments.positive_list,
        default=[4, 8, 16, 32, 64],
        metavar="N,N,...",
        help="segment lengths, multiples of 4; the memory is as long (default: 4,8,16,32,64)",
    )
    arguments.add_flag(
        context,
        "--decoder-embed-dim",
        "--dim",
        type=arguments.positive,
        default=256,
        metavar="N",
        help="model dimension (default: 256)",
    )
    arguments.add_flag(
        context,
        "--batch-size",
        "--streams",
        type=arguments.positive,
        default=8,
        metavar="N",
        help="streams (default: 8)",
    )
    context.add_argument("--rounds", type=arguments.positive, default=5, metavar="N", help="timed steps (default: 5)")
    arguments.add_outputs(context)
    curves = figures.add_parser(
        "curves",
        help="losses of training runs over updates, hours or sizes, from fairseq's logs (HAED, Figures 2 to 4)",
        allow_abbrev=False,
    )
    curves.add_argument(
        "logs",
        nargs="+",
        metavar="[LABEL=]LOG[,LOG ...]",
        help="what fairseq-train printed; logs behind a comma are later phases of the same training",
    )
    curves.add_argument(
        "--over",
        choices=("updates", "hours", "label"),
        default="updates",
        help="label: the best of each run against its label, a number such as units of a layer (default: updates)",
    )
    arguments.add_flag(
        curves, "--gen-subset", "--subset", default="valid", help="train, or a validation split (default: valid)"
    )
    curves.add_argument("--metric", default="loss", help="statistic of the log; loss is in bits (default: loss)")
    arguments.add_outputs(curves)


def run(args: argparse.Namespace) -> int:
    """Print the figure's numbers, and write what was asked for."""
    from fairseq_ms.analysis import report

    report.check_outputs(args.json, args.png)
    arguments.quieten()
    return {"attention": _attention, "context": _context, "curves": _curves}[args.figure](args)


def _attention(args: argparse.Namespace) -> int:
    from fairseq_ms.analysis import report, untrained
    from fairseq_ms.analysis.plot import attention

    # On the meta device: what is drawn depends on the layout alone, and presets are large.
    model, cfg = untrained.build(args.fairseq_flags, vocabulary=1000, on_meta=True)
    name = str(cfg.model._name)
    drawn = attention.patterns(model, args.length)
    print(f"{name}: what the last of {args.length} positions sees")
    print(report.format_table(["attention", "blocks", "tokens"], attention.rows(drawn)))
    if args.json:
        panels = [{"title": panel.title, "factor": panel.factor, "block": panel.block.tolist()} for panel in drawn]
        report.write_json(args.json, {"command": args.command, "arch": name, "panels": panels})
    if args.png:
        together = attention.share_a_layer(model)
        report.write_png(
            args.png,
            lambda figure: attention.draw(figure, drawn, name, together),
            width=3.2 * (len(drawn) + together),
            height=3.5,
        )
    return 0


def _context(args: argparse.Namespace) -> int:
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.plot import context_growth
    from fairseq_ms.errors import UsageError

    _refuse_unknown(args)
    if any(segment % 4 for segment in args.segments):
        raise UsageError(f"--segments must be multiples of 4, the coarsest scale: got {args.segments}")
    if args.decoder_embed_dim % 2 or (args.decoder_embed_dim > 64 and args.decoder_embed_dim % 64):
        raise UsageError(
            f"--decoder-embed-dim must be even, and a multiple of 64 above that: got {args.decoder_embed_dim}"
        )
    dim, streams = args.decoder_embed_dim, args.batch_size
    curves = context_growth.measure(sorted(set(args.segments)), dim, streams, args.rounds)
    print(f"one segment of one stream, d = {dim}, {streams} streams a step, segment and memory equally long")
    header = ["model", "segment", "average context", "MB kept", "ms a step"]
    print(report.format_table(header, context_growth.rows(curves)))
    if args.json:
        sizes = {"dim": dim, "streams": streams, "rounds": args.rounds}
        report.write_json(args.json, {"command": args.command, **sizes, "curves": context_growth.as_json(curves)})
    if args.png:
        report.write_png(args.png, lambda figure: context_growth.draw(figure, curves), width=10)
    return 0


def _curves(args: argparse.Namespace) -> int:
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.plot import curves

    _refuse_unknown(args)
    loaded = [curves.load(text, args.gen_subset) for text in args.logs]
    if args.over == "label":
        curves.numbers(loaded)
    print(f"{args.metric} on {args.gen_subset}")
    print(report.format_table(["run", "updates", "hours", "best", "last"], curves.rows(loaded, args.metric)))
    if args.json:
        report.write_json(args.json, {"command": args.command, "runs": curves.as_json(loaded, args.metric)})
    if args.png:
        report.write_png(args.png, lambda figure: curves.draw(figure, loaded, args.over, args.metric, args.gen_subset))
    return 0


def _refuse_unknown(args: argparse.Namespace) -> None:
    from fairseq_ms.errors import UsageError

    if args.fairseq_flags:
        raise UsageError(f"plot {args.figure} has no flag {args.fairseq_flags[0]}")
