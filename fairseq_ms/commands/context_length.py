"""`fairseq-ms context-length`: how many tokens a streaming model looks back (Appendix B; n_c of Tables 1, 3, 5)."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq_ms.commands import shared

NAME = "context-length"
HELP = "minimum, maximum and average context length of a streaming model, by formula and measured"
TAKES_FAIRSEQ_FLAGS = True

# Model, n_s, n_m, n_cm and the n_c that the paper prints.
_PAPER = [
    ("Table 1", "transformer_xl", 4, 12, 0, 98),
    ("Table 1", "compressive_transformer", 4, 6, 6, 146),
    ("Table 1", "transformer_ql", 4, 12, 0, 138),
    ("Table 1", "transformer_xl", 8, 24, 0, 196),
    ("Table 1", "compressive_transformer", 8, 12, 12, 292),
    ("Table 1", "transformer_ql", 8, 24, 0, 276),
    ("Table 3", "transformer_xl", 8, 8, 0, 68),
    ("Table 3", "transformer_ql", 8, 8, 0, 100),
    ("Table 3", "transformer_xl", 16, 16, 0, 136),
    ("Table 3", "transformer_ql", 16, 16, 0, 200),
    ("Table 3", "transformer_xl", 2, 30, 0, 241),
    ("Table 3", "transformer_ql", 2, 30, 0, 332),
    ("Table 5", "transformer_ql", 16, 0, 0, 8),
    ("Table 5", "transformer_ql", 32, 0, 0, 16),
    ("Table 5", "transformer_ql", 64, 0, 0, 32),
    ("Table 5", "transformer_ql", 128, 0, 0, 64),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, by fairseq's flags or as a checkpoint, or the paper's tables."""
    parser.usage = (
        "fairseq-ms context-length (--arch ARCH [FLAGS OF FAIRSEQ-TRAIN ...] | --path CHECKPOINT | --paper) [OPTIONS]"
    )
    parser.add_argument("--path", metavar="CHECKPOINT", help="take the model of a checkpoint")
    parser.add_argument("--paper", action="store_true", help="print every n_c of the paper's Tables 1, 3 and 5")
    parser.add_argument(
        "--measure", action="store_true", help="also find out on the network itself, by changing tokens one by one"
    )
    shared.add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from fairseq_ms.analysis import context_length, report
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, None)
    shared.quieten()
    if args.paper:
        if args.path or args.fairseq_flags:
            raise UsageError("--paper must be given without a model: got one as well")
        return _paper(args)
    model = _model(args)
    decoder = model.decoder
    if not hasattr(decoder, "memory_reach"):
        raise UsageError(f"--arch must be a model with a memory: got {type(model).__name__}")
    rows: list[list[Any]] = []
    found = {"formula": context_length.by_formula(decoder)}
    if args.measure:
        found["measured"] = context_length.measured(model)
    rows = [[name, *context.as_dict().values()] for name, context in found.items()]
    print(f"tokens of context of an output, with segments of {decoder.segment_len} tokens")
    print(report.format_table(["", "minimum", "maximum", "average"], rows))
    if args.json:
        results = {name: context.as_dict() for name, context in found.items()}
        report.write_json(args.json, {"command": NAME, "segment": decoder.segment_len, "results": results})
    return 0


def _model(args: argparse.Namespace) -> Any:
    from fairseq_ms.analysis import checkpoints, memory_measured
    from fairseq_ms.errors import UsageError
    from fairseq_ms.models.vocabulary import enough_symbols

    if args.path:
        if args.fairseq_flags:
            raise UsageError(f"--path brings its own flags: {args.fairseq_flags[0]} must not be given with it")
        return checkpoints.load(args.path, cpu=True).model
    if not args.fairseq_flags:
        raise UsageError("--arch, --path or --paper must be given: got none of them")
    cfg = memory_measured.parse(args.fairseq_flags)
    # How many symbols there are does not matter to what depends on what, nor do weights to the formula.
    return memory_measured.build_model(cfg, enough_symbols(cfg.model, 100), on_meta=not args.measure)


def _paper(args: argparse.Namespace) -> int:
    from fairseq_ms.analysis import context_length, report
    from fairseq_ms.analysis.context_length import measured

    rows: list[list[Any]] = []
    for table, arch, segment, memory, compressed, printed in _PAPER:
        flags = ["--arch", arch, "--tokens-per-sample", str(segment), "--mem-len", str(memory)]
        if compressed:
            flags += ["--compressed-mem-len", str(compressed)]
        if arch == "transformer_ql":
            context = context_length.transformer_ql(segment, memory, {1: 3, 2: 3}, 2)
        elif compressed:
            context = context_length.compressive_transformer(segment, memory, compressed, 2, 8)
        else:
            context = context_length.transformer_xl(segment, memory, 8)
        sizes = f"{segment}/{memory or '-'}/{compressed or '-'}"
        row: list[Any] = [table, arch, sizes, context.minimum, context.maximum, context.average, printed]
        if args.measure:
            # Fewer dimensions than the paper's, which do not matter to what depends on what.
            small = ["--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2"]
            model = _model(argparse.Namespace(path=None, measure=True, fairseq_flags=[*flags, *small]))
            row.append(measured(model).average)
        rows.append(row)
    header = ["", "model", "n_s/n_m/n_cm", "minimum", "maximum", "average", "printed"]
    header += ["measured"] if args.measure else []
    print(report.format_table(header, rows))
    if args.json:
        report.write_json(args.json, {"command": NAME, "paper": [dict(zip(header, row)) for row in rows]})
    return 0
