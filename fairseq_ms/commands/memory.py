"""`fairseq-ms memory`: where the memory of a training step goes (Table 8, Figure 2), and what fits into a budget."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fairseq_ms.commands import shared

if TYPE_CHECKING:
    from fairseq_ms.analysis.memory_formula import Sizes
    from fairseq_ms.analysis.memory_rows import Row

NAME = "memory"
HELP = "memory of a training step by scale and purpose, measured and by formula; --fit GIB finds allocations"
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
    parser.add_argument("--batch-size", type=shared.positive, metavar="N", help="samples (default: 1)")
    parser.add_argument(
        "--vocabulary",
        type=shared.positive,
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
        "--most-layers", type=shared.positive, default=16, metavar="N", help="of --fit, at a scale (default: 16)"
    )
    parser.add_argument(
        "--show", type=shared.positive, default=10, metavar="N", help="allocations of --fit to print (default: 10)"
    )
    parser.add_argument(
        "--sweep",
        type=shared.positive_list,
        metavar="N,N,...",
        help="memory and forward time of a single layer at 1x, 4x, 16x and 64x for these numbers of tokens (Figure 2)",
    )
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is a CUDA device")
    shared.add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the footprint, and what was asked for beside it."""
    from fairseq_ms.analysis import report
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, args.png)
    shared.quieten()
    if args.paper:
        return _paper(args)
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


def _model(args: argparse.Namespace) -> tuple[Any, int, Any]:
    """Configuration, number of symbols, and how to get the model itself."""
    from fairseq_ms.analysis import checkpoints, memory_measured
    from fairseq_ms.models.vocabulary import enough_symbols

    if args.path:
        loaded = checkpoints.load(args.path, args.data, args.cpu)
        return loaded.cfg, len(loaded.dictionary), lambda: loaded.model
    cfg = memory_measured.parse(args.fairseq_flags)
    vocabulary = args.vocabulary or enough_symbols(cfg.model, BOOKCORPUS)
    memory_measured.build_model(cfg, vocabulary, on_meta=True)
    return cfg, vocabulary, lambda: memory_measured.build_model(cfg, vocabulary)


def _sizes(args: argparse.Namespace, cfg: Any, vocabulary: int, batch: int) -> Sizes:
    import torch

    from fairseq_ms.analysis import memory_formula

    half = cfg.common.fp16 or cfg.common.bf16
    on_cpu = args.cpu or not torch.cuda.is_available()
    # The symbol that --add-bos-token puts before every row is computed, and kept, like any other.
    tokens = cfg.task.tokens_per_sample + int(cfg.task.add_bos_token)
    return memory_formula.sizes_of(cfg.model, batch, tokens, vocabulary, 2 if half else 4, on_cpu)


def _paper(args: argparse.Namespace) -> int:
    from fairseq_ms.analysis import memory_paper, memory_rows, report

    blocks = memory_paper.table_8()
    for title, rows, weights in blocks:
        print(f"{title} (paper's way of counting, batch 64, half precision)")
        if weights is None:
            print(memory_rows.format_rows(rows, total=False))
        else:
            print(memory_rows.format_rows(rows, [("model", weights)]))
    if args.json:
        content = [
            {"title": title, "rows": memory_rows.as_json(rows), "weights": weights} for title, rows, weights in blocks
        ]
        report.write_json(args.json, {"command": NAME, "paper": content})
    if args.png:
        bars = [(f"{title.split(',')[0]}\n{row.scale}x", row) for title, rows, _ in blocks[1:] for row in rows]
        report.write_png(args.png, lambda figure: memory_rows.draw(figure, bars), width=9)
    return 0


def _footprint(args: argparse.Namespace, cfg: Any, vocabulary: int, build: Any) -> int:
    import torch

    from fairseq_ms.analysis import memory_formula, memory_measured, memory_rows, report
    from fairseq_ms.errors import UsageError

    batch = args.batch_size or 1
    sizes = _sizes(args, cfg, vocabulary, batch)
    result: dict[str, Any] = {"batch": batch, "tokens": sizes.tokens, "vocabulary": vocabulary}
    rows: list[Row] = []
    print(f"{cfg.model._name}: {batch} x {sizes.tokens} tokens, {vocabulary} symbols, {sizes.element} bytes a number")
    try:
        rows = memory_formula.rows_of(cfg.model, sizes)
    except UsageError as why:
        print(f"no breakdown: {why}")
    if rows:
        weights = memory_measured.weight_bytes(memory_formula.parameters(cfg, vocabulary), sizes.element)
        print(memory_rows.format_rows(rows, list(weights.items())))
        result |= {"rows": memory_rows.as_json(rows), "kept": sum(row.kept for row in rows), "weights": weights}
    if not args.no_measurement:
        model = build()
        if torch.cuda.is_available() and not args.cpu:
            model = model.cuda()
        model = model.half() if cfg.common.fp16 else model.bfloat16() if cfg.common.bf16 else model
        result["measured"] = memory_measured.step_bytes(model, batch, sizes.tokens)
        result["measured_per_target"] = result["measured"] / (batch * sizes.tokens)
        print(
            f"kept for backward, measured: {result['measured'] / memory_rows.GB:.4f} GB, "
            f"{result['measured_per_target'] / 1e3:.1f} kB a scored target"
        )
        if rows:
            ratio = result["kept"] / result["measured"]
            print(f"kept for backward, formula:  {result['kept'] / memory_rows.GB:.4f} GB, {ratio:.3f} of it")
        if next(model.parameters()).is_cuda:
            result["max_memory_allocated"] = memory_measured.cuda_peak(model, batch, sizes.tokens)
            print(f"torch.cuda.max_memory_allocated: {result['max_memory_allocated'] / memory_rows.GB:.4f} GB")
    if args.json:
        report.write_json(args.json, {"command": NAME, "arch": str(cfg.model._name), **result})
    if args.png:
        if not rows:
            raise UsageError(f"--png draws the breakdown, and there is none for {cfg.model._name}")
        bars = [(f"{row.scale}x", row) for row in rows]
        report.write_png(args.png, lambda figure: memory_rows.draw(figure, bars))
    return 0


def _fit(args: argparse.Namespace, cfg: Any, vocabulary: int) -> int:
    from fairseq_ms.analysis import allocation, memory_formula, report
    from fairseq_ms.errors import UsageError

    if args.png:
        raise UsageError("--png must not be given with --fit, which has no figure: got both")
    sizes = _sizes(args, cfg, vocabulary, args.batch_size or 1)
    footprint, scales = memory_formula.footprint(cfg, sizes, args.accounting)
    found = allocation.fit(footprint, scales, args.fit * 2**30, args.most_layers, args.show)
    rows = [[number, str(best), best.bytes / 2**30] for number, best in enumerate(found, 1)]
    print(f"{cfg.model._name}, {sizes.batch} x {sizes.tokens} tokens: allocations in {args.fit:g} GiB, best first")
    print(report.format_table(["rank", "layers", "GiB"], rows))
    if args.json:
        allocations = [{"layers": best.layers, "bytes": best.bytes} for best in found]
        report.write_json(args.json, {"command": NAME, "budget_gib": args.fit, "allocations": allocations})
    return 0


def _sweep(args: argparse.Namespace, cfg: Any) -> int:
    from fairseq_ms.analysis import memory_formula, memory_sweep, report

    sizes = _sizes(args, cfg, 0, args.batch_size or 1)
    memory_formula.require_full_attention(cfg.model)
    points = memory_sweep.sweep(cfg.model, sizes, args.sweep, args.cpu)
    rows = [
        [point["tokens"], f"{point['scale']}x", point["formula"] / 1e6, point["measured"] / 1e6, point["seconds"] * 1e3]
        for point in points
    ]
    print(f"one layer of {cfg.model._name}, {sizes.batch} samples")
    print(report.format_table(["tokens", "scale", "formula (MB)", "measured (MB)", "forward (ms)"], rows))
    if args.json:
        report.write_json(args.json, {"command": NAME, "batch": sizes.batch, "sweep": points})
    if args.png:
        report.write_png(args.png, lambda figure: memory_sweep.draw(figure, points), width=9)
    return 0
