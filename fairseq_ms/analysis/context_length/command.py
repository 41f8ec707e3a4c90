"""`fairseq-ms context-length`: how many tokens a streaming model looks back (Appendix B; n_c of Tables 1, 3, 5)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fairseq_ms.analysis import arguments

if TYPE_CHECKING:
    from fairseq.models import FairseqLanguageModel
    from omegaconf import DictConfig

TAKES_FAIRSEQ_FLAGS = True
# What Transformer-QL's Tables 1, 3 and 5 print: a model, its n_s, n_m and n_cm, and the n_c beside it.
PRINTED = (
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
)
LENGTHS = ("minimum", "maximum", "average")
# Fewer dimensions than the paper's, which do not matter to what depends on what.
NARROW = ["--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, by fairseq's flags or as a checkpoint, or the paper's tables."""
    arguments.add_model(parser, "print every n_c of the paper's Tables 1, 3 and 5")
    parser.add_argument(
        "--measure", action="store_true", help="also find out on the network itself, by changing tokens one by one"
    )
    arguments.add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.context_length import formula, measured
    from fairseq_ms.core.streaming import StreamingModel
    from fairseq_ms.errors import UsageError
    from fairseq_ms.lm.streaming import with_a_memory

    report.check_outputs(args.json, None)
    arguments.quieten()
    arguments.check_model(args)
    if args.paper:
        return _paper(args)
    model, flag, arch = _model(args)
    network = model.decoder.core
    if not isinstance(network, StreamingModel):
        *most, last = with_a_memory()
        raise UsageError(f"{flag} must be a model with a memory, {', '.join(most)} or {last}: got {arch}")
    found = {"formula": formula.by_formula(network)}
    if args.measure:
        found["measured"] = measured.measured(model)
    print(f"tokens of context of an output, with segments of {network.segment_len} tokens")
    print(report.format_table(["", *LENGTHS], [[name, *vars(context).values()] for name, context in found.items()]))
    if args.json:
        results = {name: vars(context) for name, context in found.items()}
        report.write_json(args.json, {"command": args.command, "segment": network.segment_len, "results": results})
    return 0


def _model(args: argparse.Namespace) -> tuple[FairseqLanguageModel, str, str]:
    """The model, the flag that it comes from, and its architecture."""
    from fairseq_ms.analysis import checkpoints, untrained
    from fairseq_ms.errors import UsageError

    if args.path:
        loaded = checkpoints.load(args.path, cpu=True)
        return loaded.model, "--path", untrained.architecture(loaded.cfg.model)
    if not args.fairseq_flags:
        raise UsageError("--arch, --path or --paper must be given: got none of them")
    model, cfg = _untrained(args.fairseq_flags, on_meta=not args.measure)
    return model, "--arch", untrained.architecture(cfg.model)


def _untrained(flags: list[str], on_meta: bool = False) -> tuple[FairseqLanguageModel, DictConfig]:
    from fairseq_ms.analysis import untrained
    from fairseq_ms.lm.vocabulary import enough_symbols

    cfg = untrained.parse(flags)
    # How many symbols there are does not matter to what depends on what, nor do weights to the formula.
    return untrained.build_model(cfg, enough_symbols(cfg.model, 100), on_meta), cfg


def _paper(args: argparse.Namespace) -> int:
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.context_length import formula, measured

    rows: list[list[object]] = []
    for table, arch, segment, memory, compressed, printed in PRINTED:
        # Eight layers each; Transformer-QL's are three at 1x, three at 2x and two for the output.
        if arch == "transformer_ql":
            context = formula.transformer_ql(segment, memory, {1: 3, 2: 3}, 2)
        else:
            context = formula.compressive_transformer(segment, memory, compressed, 2, 8)
        sizes = f"{segment}/{memory or '-'}/{compressed or '-'}"
        rows.append([table, arch, sizes, *vars(context).values(), printed])
        if args.measure:
            flags = ["--arch", arch, "--tokens-per-sample", str(segment), "--mem-len", str(memory), *NARROW]
            flags += ["--compressed-mem-len", str(compressed)] if compressed else []
            rows[-1].append(measured.measured(_untrained(flags)[0]).average)
    header = ["", "model", "n_s/n_m/n_cm", *LENGTHS, "printed", *(["measured"] if args.measure else [])]
    print(report.format_table(header, rows))
    if args.json:
        report.write_json(args.json, {"command": args.command, "paper": [dict(zip(header, row)) for row in rows]})
    return 0
