"""`fairseq-ms memory`: where the memory of a training step goes (Table 8, Figure 2), and what fits into a budget."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from fairseq_ms.analysis import arguments

if TYPE_CHECKING:
    import torch
    from fairseq.models import FairseqLanguageModel
    from omegaconf import DictConfig

TAKES_FAIRSEQ_FLAGS = True
BOOKCORPUS = 31300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, by fairseq's flags or as a checkpoint, and what to say about it."""
    arguments.add_model(parser, "print the paper's Table 8 from its own way of counting")
    parser.add_argument("--data", help="of --path: folder with its dictionary (default: the one trained on)")
    parser.add_argument("--batch-size", type=arguments.positive, metavar="N", help="samples (default: 1)")
    parser.add_argument(
        "--vocabulary",
        type=arguments.positive,
        metavar="N",
        help=f"symbols (default: {BOOKCORPUS}, BookCorpus, or as many as adaptive cutoffs need)",
    )
    parser.add_argument(
        "--no-measurement",
        action="store_true",
        help="follow the shapes of a step without running it",
    )
    parser.add_argument("--fit", type=float, metavar="GIB", help="which layers a scale fit into so many GiB")
    parser.add_argument(
        "--accounting",
        choices=("ours", "paper"),
        default="ours",
        help="of --fit: our step, with weights, gradients and Adam, or the paper's, as in Table 8 (default: ours)",
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
    """Print the footprint, or what was asked for in its place."""
    from fairseq_ms.analysis import report
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, args.png)
    arguments.quieten()
    arguments.check_model(args)
    if args.paper:
        return _paper(args)
    if args.fit is not None and not 0 < args.fit < float("inf"):
        raise UsageError(f"--fit must be a number of GiB above 0: got {args.fit}")
    if args.fit is not None and args.sweep:
        raise UsageError("--fit and --sweep must not be given together: got both")
    if args.fit is not None and args.png:
        raise UsageError("--png must not be given with --fit, which has no figure: got both")
    if args.data and not args.path:
        raise UsageError(f"--data goes with --path, whose dictionary it has: got {args.data} without it")
    return (_fit if args.fit is not None else _sweep if args.sweep else _footprint)(args, _asked(args))


class _Asked(NamedTuple):
    """Whose memory it is, and of which step: a model that is loaded, or None for one that is yet to be built."""

    cfg: DictConfig
    vocabulary: int
    loaded: FairseqLanguageModel | None
    batch: int
    tokens: int
    device: torch.device
    dtype: torch.dtype

    def model(self) -> FairseqLanguageModel:
        """The model, in the precision that it is trained in."""
        from fairseq_ms.analysis import untrained

        if self.loaded is not None:
            return self.loaded.to(self.dtype)
        return untrained.build_model(self.cfg, self.vocabulary, device=self.device, dtype=self.dtype)

    def __str__(self) -> str:
        return f"{self.cfg.model._name}: {self.batch} x {self.tokens} tokens"


def _asked(args: argparse.Namespace) -> _Asked:
    import torch

    from fairseq_ms.analysis import checkpoints, training_step, untrained
    from fairseq_ms.lm.vocabulary import enough_symbols

    loaded = None
    if args.path:
        checkpoint = checkpoints.load(args.path, args.data, args.cpu)
        cfg, vocabulary = checkpoint.cfg, len(checkpoint.dictionary)
        loaded = None if args.no_measurement else checkpoint.model
    else:
        cfg = untrained.parse(args.fairseq_flags)
        vocabulary = args.vocabulary or enough_symbols(cfg.model, BOOKCORPUS)
        untrained.build_model(cfg, vocabulary, on_meta=True)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    dtype = torch.half if cfg.common.fp16 else torch.bfloat16 if cfg.common.bf16 else torch.float
    return _Asked(cfg, vocabulary, loaded, args.batch_size or 1, training_step.tokens_of(cfg), device, dtype)


def _paper(args: argparse.Namespace) -> int:
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.memory import paper, table

    blocks = paper.table_8()
    for title, parts, weights in blocks:
        print(f"{title} (paper's way of counting, batch 64, half precision)")
        print(table.format_parts(parts, {} if weights is None else {"model": weights}, with_total=weights is not None))
    if args.json:
        content = [
            {"title": title, "rows": table.as_json(parts), "weights": weights} for title, parts, weights in blocks
        ]
        report.write_json(args.json, {"command": args.command, "paper": content})
    if args.png:
        bars = {f"{title.split(',')[0]} {part}": parts[part] for title, parts, _ in blocks[1:] for part in parts}
        report.write_png(args.png, lambda figure: table.draw(figure, bars), width=9)
    return 0


def _footprint(args: argparse.Namespace, asked: _Asked) -> int:
    from fairseq_ms.analysis import report, training_step
    from fairseq_ms.analysis.memory import table
    from fairseq_ms.errors import UsageError

    batch, tokens = asked.batch, asked.tokens
    print(f"{asked}, {asked.vocabulary} symbols, {asked.dtype.itemsize} bytes a number")
    result: dict[str, object] = {"batch": batch, "tokens": tokens, "vocabulary": asked.vocabulary}
    parts: table.Parts = {}
    with training_step.ShapesAlone() if args.no_measurement else nullcontext():
        model = asked.model()
        try:
            parts = training_step.step_parts(model, batch, tokens)
        except UsageError as why:
            print(f"no breakdown: {why}")
        weights = training_step.weight_bytes(model)
    kept = table.total(parts)
    gradient = training_step.logits_gradient(model, batch, tokens)
    print(table.format_parts(parts, {"gradient of logits": gradient, **weights}))
    result |= {"gradient_of_logits": gradient, "weights": weights}
    if parts:
        result |= {"rows": table.as_json(parts), "kept": kept}
    if not args.no_measurement:
        result |= {"measured": kept, "measured_per_target": kept / (batch * tokens)}
        a_target = f"{kept / (batch * tokens) / 1e3:.1f} kB a scored target"
        print(f"kept for backward, measured: {kept / table.GB:.4f} GB, {a_target}")
        peak = training_step.cuda_peak(model, batch, tokens)
        if peak is not None:
            result["max_memory_allocated"] = peak
            print(f"torch.cuda.max_memory_allocated: {peak / table.GB:.4f} GB")
    if args.json:
        report.write_json(args.json, {"command": args.command, "arch": str(asked.cfg.model._name), **result})
    if args.png:
        if not parts:
            raise UsageError(f"--png draws the breakdown, and there is none for {asked.cfg.model._name}")
        report.write_png(args.png, lambda figure: table.draw(figure, parts), width=9)
    return 0


def _fit(args: argparse.Namespace, asked: _Asked) -> int:
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.memory import fit

    def footprint(layers: fit.Layers) -> float:
        if args.accounting == "paper":
            return fit.paper_bytes(asked.cfg, layers, asked.batch, asked.vocabulary)
        return fit.step_bytes(asked.cfg, layers, asked.batch, asked.vocabulary, asked.device, asked.dtype)

    found = fit.fit(footprint, fit.scales_of(asked.cfg), args.fit * 2**30, args.most_layers, args.top)
    print(f"{asked}: allocations in {args.fit:g} GiB, best first")
    rows = [[rank, str(best), best.bytes / 2**30] for rank, best in enumerate(found, 1)]
    print(report.format_table(["rank", "layers", "GiB"], rows))
    if args.json:
        allocations = [{"layers": best.layers, "bytes": best.bytes} for best in found]
        report.write_json(args.json, {"command": args.command, "budget_gib": args.fit, "allocations": allocations})
    return 0


def _sweep(args: argparse.Namespace, asked: _Asked) -> int:
    from fairseq_ms.analysis import report, untrained
    from fairseq_ms.analysis.memory import sweep
    from fairseq_ms.errors import UsageError

    full = ("vanilla_lm", "multiscale_topdown", "multiscale_bottomup")
    if untrained.architecture(asked.cfg.model) not in full or getattr(asked.cfg.model, "scale_windows", None):
        raise UsageError(f"--sweep needs layers of full attention, which {asked.cfg.model._name} does not have")
    points = sweep.sweep(asked.cfg.model, asked.batch, args.sweep, asked.device)
    rows = [
        [point["tokens"], f"{point['scale']}x", point["measured"] / 1e6, point["seconds"] * 1e3] for point in points
    ]
    print(f"one layer of {asked.cfg.model._name}, {asked.batch} samples")
    print(report.format_table(["tokens", "scale", "kept (MB)", "forward (ms)"], rows))
    if args.json:
        report.write_json(args.json, {"command": args.command, "batch": asked.batch, "sweep": points})
    if args.png:
        report.write_png(args.png, lambda figure: sweep.draw(figure, points), width=9)
    return 0
