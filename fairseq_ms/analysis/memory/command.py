"""`fairseq-ms memory`: where the memory of a training step goes (Table 8, Figure 2), and what fits into a budget."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fairseq_ms.analysis import arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from fairseq.models import FairseqLanguageModel
    from omegaconf import DictConfig

    from fairseq_ms.analysis.memory.layers import Sizes
    from fairseq_ms.analysis.memory.rows import Row

TAKES_FAIRSEQ_FLAGS = True
BOOKCORPUS = 31300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, by fairseq's flags or as a checkpoint, and what to say about it."""
    parser.usage = (
        "fairseq-ms memory (--arch ARCH [FLAGS OF FAIRSEQ-TRAIN ...] | --path CHECKPOINT | --paper) [OPTIONS]"
    )
    parser.add_argument("--path", metavar="CHECKPOINT", help="take the model of a checkpoint")
    parser.add_argument("--data", help="of --path: folder with its dictionary (default: the one trained on)")
    parser.add_argument("--paper", action="store_true", help="print the paper's Table 8 from its own way of counting")
    parser.add_argument("--batch-size", type=arguments.positive, metavar="N", help="samples (default: 1)")
    parser.add_argument(
        "--vocabulary",
        type=arguments.positive,
        metavar="N",
        help=f"symbols (default: {BOOKCORPUS}, BookCorpus, or as many as adaptive cutoffs need)",
    )
    parser.add_argument("--no-measurement", action="store_true", help="do not run the model, print the formula alone")
    parser.add_argument("--fit", type=float, metavar="GIB", help="which layers a scale fit into so many GiB")
    parser.add_argument(
        "--accounting",
        choices=("ours", "paper"),
        default="ours",
        help="of --fit: our layers, with weights, gradients and Adam, or the paper's, as in Table 8 (default: ours)",
    )
    parser.add_argument(
        "--most-layers", type=arguments.positive, default=16, metavar="N", help="of --fit, at a scale (default: 16)"
    )
    arguments.add_flag(
        parser,
        "--top",
        "--show",
        type=arguments.positive,
        default=10,
        metavar="N",
        help="allocations of --fit to print (default: 10)",
    )
    parser.add_argument(
        "--sweep",
        type=arguments.positive_list,
        metavar="N,N,...",
        help="memory and forward time of a single layer at 1x, 4x, 16x and 64x for these numbers of tokens (Figure 2)",
    )
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is a CUDA device")
    arguments.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the footprint, and what was asked for beside it."""
    from fairseq_ms.analysis import report
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, args.png)
    arguments.quieten()
    if args.paper and args.fairseq_flags:
        raise UsageError(f"--paper prints the paper's models alone: {args.fairseq_flags[0]} must not be given with it")
    if args.paper:
        return _paper(args)
    if args.fit is not None and not 0 < args.fit < float("inf"):
        raise UsageError(f"--fit must be a number of GiB above 0: got {args.fit}")
    if args.fit is not None and args.sweep:
        raise UsageError("--fit and --sweep must not be given together: got both")
    if args.path and args.fairseq_flags:
        raise UsageError(f"--path brings its own flags: {args.fairseq_flags[0]} must not be given with it")
    if args.data and not args.path:
        raise UsageError(f"--data goes with --path, whose dictionary it has: got {args.data} without it")
    cfg, vocabulary, build = _model(args)
    if args.fit is not None:
        return _fit(args, cfg, vocabulary)
    if args.sweep:
        return _sweep(args, cfg)
    return _footprint(args, cfg, vocabulary, build)


def _model(args: argparse.Namespace) -> tuple[DictConfig, int, Callable[[], FairseqLanguageModel]]:
    """Configuration, number of symbols, and how to get the model itself."""
    from fairseq_ms.analysis import checkpoints, untrained
    from fairseq_ms.lm.vocabulary import enough_symbols

    if args.path:
        loaded = checkpoints.load(args.path, args.data, args.cpu)
        return loaded.cfg, len(loaded.dictionary), lambda: loaded.model
    cfg = untrained.parse(args.fairseq_flags)
    vocabulary = args.vocabulary or enough_symbols(cfg.model, BOOKCORPUS)
    untrained.build_model(cfg, vocabulary, on_meta=True)
    return cfg, vocabulary, lambda: untrained.build_model(cfg, vocabulary)


def _sizes(args: argparse.Namespace, cfg: DictConfig, vocabulary: int, batch: int) -> Sizes:
    import torch

    from fairseq_ms.analysis.memory import layers

    half = cfg.common.fp16 or cfg.common.bf16
    on_cpu = args.cpu or not torch.cuda.is_available()
    # The symbol that --add-bos-token puts before every row is computed, and kept, like any other.
    tokens = cfg.task.tokens_per_sample + int(cfg.task.add_bos_token)
    return layers.sizes_of(cfg.model, batch, tokens, vocabulary, 2 if half else 4, on_cpu)


def _paper(args: argparse.Namespace) -> int:
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.memory import paper
    from fairseq_ms.analysis.memory import rows as tables

    blocks = paper.table_8()
    for title, rows, weights in blocks:
        print(f"{title} (paper's way of counting, batch 64, half precision)")
        if weights is None:
            print(tables.format_rows(rows, total=False))
        else:
            print(tables.format_rows(rows, [("model", weights)]))
    if args.json:
        content = [
            {"title": title, "rows": tables.as_json(rows), "weights": weights} for title, rows, weights in blocks
        ]
        report.write_json(args.json, {"command": args.command, "paper": content})
    if args.png:
        bars = [(f"{title.split(',')[0]}\n{row.scale}x", row) for title, rows, _ in blocks[1:] for row in rows]
        report.write_png(args.png, lambda figure: tables.draw(figure, bars), width=9)
    return 0


def _footprint(
    args: argparse.Namespace, cfg: DictConfig, vocabulary: int, build: Callable[[], FairseqLanguageModel]
) -> int:
    import torch

    from fairseq_ms.analysis import report, training_step
    from fairseq_ms.analysis.memory import formula
    from fairseq_ms.analysis.memory import rows as tables
    from fairseq_ms.errors import UsageError

    batch = args.batch_size or 1
    sizes = _sizes(args, cfg, vocabulary, batch)
    result: dict[str, object] = {"batch": batch, "tokens": sizes.tokens, "vocabulary": vocabulary}
    rows: list[Row] = []
    print(f"{cfg.model._name}: {batch} x {sizes.tokens} tokens, {vocabulary} symbols, {sizes.element} bytes a number")
    try:
        rows = formula.rows_of(cfg.model, sizes)
    except UsageError as why:
        print(f"no breakdown: {why}")
    kept = sum(row.kept for row in rows)
    if rows:
        weights = training_step.weight_bytes(formula.parameters(cfg, vocabulary), sizes.element)
        print(tables.format_rows(rows, list(weights.items())))
        result |= {"rows": tables.as_json(rows), "kept": kept, "weights": weights}
    if not args.no_measurement:
        model = build()
        if torch.cuda.is_available() and not args.cpu:
            model = model.cuda()
        model = model.half() if cfg.common.fp16 else model.bfloat16() if cfg.common.bf16 else model
        measured = training_step.step_bytes(model, batch, sizes.tokens)
        a_target = measured / (batch * sizes.tokens)
        result |= {"measured": measured, "measured_per_target": a_target}
        print(f"kept for backward, measured: {measured / tables.GB:.4f} GB, {a_target / 1e3:.1f} kB a scored target")
        if rows:
            print(f"kept for backward, formula:  {kept / tables.GB:.4f} GB, {kept / measured:.3f} of it")
        peak = training_step.cuda_peak(model, batch, sizes.tokens)
        if peak is not None:
            result["max_memory_allocated"] = peak
            print(f"torch.cuda.max_memory_allocated: {peak / tables.GB:.4f} GB")
    if args.json:
        report.write_json(args.json, {"command": args.command, "arch": str(cfg.model._name), **result})
    if args.png:
        if not rows:
            raise UsageError(f"--png draws the breakdown, and there is none for {cfg.model._name}")
        bars = [(f"{row.scale}x", row) for row in rows]
        report.write_png(args.png, lambda figure: tables.draw(figure, bars))
    return 0


def _fit(args: argparse.Namespace, cfg: DictConfig, vocabulary: int) -> int:
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.memory import allocation, formula
    from fairseq_ms.errors import UsageError

    if args.png:
        raise UsageError("--png must not be given with --fit, which has no figure: got both")
    sizes = _sizes(args, cfg, vocabulary, args.batch_size or 1)
    footprint, scales = formula.footprint(cfg, sizes, args.accounting)
    found = allocation.fit(footprint, scales, args.fit * 2**30, args.most_layers, args.top)
    rows = [[rank, str(best), best.bytes / 2**30] for rank, best in enumerate(found, 1)]
    print(f"{cfg.model._name}, {sizes.batch} x {sizes.tokens} tokens: allocations in {args.fit:g} GiB, best first")
    print(report.format_table(["rank", "layers", "GiB"], rows))
    if args.json:
        allocations = [{"layers": best.layers, "bytes": best.bytes} for best in found]
        report.write_json(args.json, {"command": args.command, "budget_gib": args.fit, "allocations": allocations})
    return 0


def _sweep(args: argparse.Namespace, cfg: DictConfig) -> int:
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.memory import formula, sweep

    sizes = _sizes(args, cfg, 0, args.batch_size or 1)
    formula.require_full_attention(cfg.model)
    points = sweep.sweep(cfg.model, sizes, args.sweep, args.cpu)
    rows = [
        [point["tokens"], f"{point['scale']}x", point["formula"] / 1e6, point["measured"] / 1e6, point["seconds"] * 1e3]
        for point in points
    ]
    print(f"one layer of {cfg.model._name}, {sizes.batch} samples")
    print(report.format_table(["tokens", "scale", "formula (MB)", "measured (MB)", "forward (ms)"], rows))
    if args.json:
        report.write_json(args.json, {"command": args.command, "batch": sizes.batch, "sweep": points})
    if args.png:
        report.write_png(args.png, lambda figure: sweep.draw(figure, points), width=9)
    return 0
