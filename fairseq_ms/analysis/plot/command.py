"""`fairseq-ms plot`: figures that need no checkpoint."""

from __future__ import annotations

import argparse

from fairseq_ms.analysis import arguments, report
from fairseq_ms.analysis.flags import add_counts
from fairseq_ms.errors import UsageError

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
    add_counts(attention, ("--length", 48, "tokens of the text"))
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
    add_counts(
        context,
        ("--decoder-embed-dim --dim", 256, "model dimension"),
        ("--batch-size --streams", 8, "streams"),
        ("--rounds", 5, "timed steps"),
    )
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
    for figure in (attention, context, curves):
        arguments.add_outputs(figure)


def run(args: argparse.Namespace) -> int:
    """Print the figure's numbers, and write what was asked for."""
    report.check_outputs(args.json, args.png)
    arguments.quieten()
    if args.fairseq_flags and args.figure != "attention":
        raise UsageError(f"plot {args.figure} has no flag {args.fairseq_flags[0]}")
    found = {"attention": _attention, "context": _context, "curves": _curves}[args.figure](args)
    if args.json:
        report.write_json(args.json, {"command": args.command, **found})
    return 0


def _attention(args: argparse.Namespace) -> dict[str, object]:
    from fairseq_ms.analysis import untrained
    from fairseq_ms.analysis.plot import attention

    # On the meta device: what is drawn depends on the layout alone, and presets are large.
    model, cfg = untrained.build(args.fairseq_flags, vocabulary=1000, on_meta=True)
    name = str(cfg.model._name)
    drawn = attention.patterns(model, args.length)
    print(f"{name}: what the last of {args.length} positions sees")
    print(report.format_table(["attention", "blocks", "tokens"], attention.rows(drawn)))
    if args.png:
        together = attention.share_a_layer(model)
        width = 3.2 * (len(drawn) + together)
        report.write_png(args.png, lambda figure: attention.draw(figure, drawn, name, together), width, height=3.5)
    panels = [{"title": panel.title, "factor": panel.factor, "block": panel.block.tolist()} for panel in drawn]
    return {"arch": name, "panels": panels}


def _context(args: argparse.Namespace) -> dict[str, object]:
    from dataclasses import asdict

    from fairseq_ms.analysis.plot import context_growth

    dim, streams = args.decoder_embed_dim, args.batch_size
    if any(segment % 4 for segment in args.segments):
        raise UsageError(f"--segments must be multiples of 4, the coarsest scale: got {args.segments}")
    if dim % 2 or (dim > 64 and dim % 64):
        raise UsageError(f"--decoder-embed-dim must be even, and a multiple of 64 above that: got {dim}")
    measured = context_growth.measure(sorted(set(args.segments)), dim, streams, args.rounds)
    curves = {name: [asdict(point) for point in points] for name, points in measured.items()}
    print(f"one segment of one stream, d = {dim}, {streams} streams a step, segment and memory equally long")
    rows = [[name, *point.values()] for name, points in curves.items() for point in points]
    print(report.format_table(["model", "segment", "average context", "MB kept", "ms a step"], rows))
    if args.png:
        report.write_png(args.png, lambda figure: context_growth.draw(figure, measured), width=10)
    return {"dim": dim, "streams": streams, "rounds": args.rounds, "curves": curves}


def _curves(args: argparse.Namespace) -> dict[str, object]:
    from fairseq_ms.analysis.plot import curves

    loaded = [curves.load(text, args.gen_subset) for text in args.logs]
    sizes = curves.numbers(loaded) if args.over == "label" else []
    print(f"{args.metric} on {args.gen_subset}")
    print(report.format_table(["run", "updates", "hours", "best", "last"], curves.rows(loaded, args.metric)))
    if args.png:
        name = f"{args.gen_subset} {args.metric}"
        if args.over == "label":
            report.write_png(args.png, lambda figure: curves.draw_sizes(figure, loaded, sizes, args.metric, name))
        else:
            report.write_png(args.png, lambda figure: curves.draw(figure, loaded, args.over, args.metric, name))
    return {"runs": curves.as_json(loaded, args.metric)}
