"""`fairseq-ms perplexity`: perplexity by subword and by word, and bits per byte, from one evaluation."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path

from fairseq_ms.analysis import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags spelled as fairseq-eval-lm spells them, and where the counts come from and results go."""
    parser.add_argument("checkpoint", help="file that fairseq-train wrote")
    parser.add_argument("--data", help="folder that fairseq-preprocess wrote (default: the one trained on)")
    parser.add_argument("--gen-subset", default="test", metavar="SPLIT", help="split of the data (default: test)")
    parser.add_argument("--tokens-per-sample", type=int, metavar="N", help="window in tokens (default: as in training)")
    parser.add_argument(
        "--context-window",
        type=int,
        metavar="N",
        help="tokens of a window that are only context, so the stride is the rest (default: half the window; "
        "0 for models whose context is their memory)",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="most windows in a batch (default: what --max-tokens has room for)"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens in a batch (default: 36000)")
    parser.add_argument(
        "--sample-break-mode",
        choices=("none", "complete", "complete_doc", "eos"),
        help="what a window may hold; eos is a line or image by itself, without context (default: eos where the model "
        "was trained so, else none)",
    )
    parser.add_argument("--fp16", action="store_true", help="half precision")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is a CUDA device")
    parser.add_argument("--manifest", type=Path, help="counts of the data (default: manifest.json in or above --data)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a JSON file")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the table and write the JSON file; returns 0."""
    from fairseq_ms.analysis import report
    from fairseq_ms.analysis.perplexity import renormalise
    from fairseq_ms.errors import UsageError

    report.check_outputs(args.json, None)
    for flag in ("--tokens-per-sample", "--batch-size", "--max-tokens"):
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1: got {value}")
    if args.manifest is not None and not args.manifest.is_file():
        raise UsageError(f"--manifest must be a file: got {args.manifest}")
    arguments.check_checkpoint(args.checkpoint)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    logging.getLogger("fairseq_cli").setLevel(logging.WARNING)
    found = renormalise.evaluate(
        args.checkpoint,
        args.data,
        args.tokens_per_sample,
        args.context_window,
        args.sample_break_mode,
        _fairseq_flags(args),
    )
    manifest = args.manifest or _manifest_beside(Path(found.data))
    counts = renormalise.split_counts(manifest, args.gen_subset, found.scored.targets) if manifest else {}
    settings: dict[str, object] = {
        "checkpoint": args.checkpoint,
        "data": found.data,
        "subset": args.gen_subset,
        "manifest": str(manifest) if manifest else None,
        "window": found.window,
        "stride": found.window - found.context,
    }
    numbers = renormalise.renormalised(found.bits, found.scored, counts)
    print("\n".join(_lines(settings, numbers)))
    if args.json is not None:
        # A line without spaces is one word, whose perplexity may be beyond floating point numbers.
        report.write_json(args.json, {**settings, **numbers}, allow_nan=True)
    return 0


def _fairseq_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--gen-subset", args.gen_subset]
    for flag, value in (("--batch-size", args.batch_size), ("--max-tokens", args.max_tokens)):
        flags += [flag, str(value)] if value is not None else []
    return flags + [flag for flag, given in (("--fp16", args.fp16), ("--cpu", args.cpu)) if given]


def _manifest_beside(data: Path) -> Path | None:
    """The manifest of a prepared folder, whose binarised data lie in its `bin`."""
    return next((file for file in (data / "manifest.json", data.parent / "manifest.json") if file.is_file()), None)


def _lines(settings: Mapping[str, object], numbers: Mapping[str, float]) -> list[str]:
    rows = [
        ("checkpoint", settings["checkpoint"]),
        ("data", f"{settings['data']} ({settings['subset']})"),
        ("window, stride", f"{settings['window']}, {settings['stride']}"),
        ("scored targets", f"{numbers['targets']:,}"),
        ("bits per target", f"{numbers['bits_per_target']:.4f}"),
        ("perplexity", f"{numbers['perplexity']:.4f}"),
    ]
    if "word_perplexity" in numbers:
        counted = f"over {numbers['words_with_eol']:,} words and ends of line"
        rows.append(("word perplexity", f"{numbers['word_perplexity']:.4f}  {counted}"))
    if "fairseq_word_perplexity" in numbers:
        cut = f"{numbers['words_cut_by_blocks']:,} words cut in two by windows count twice there"
        rows.append(("by fairseq-eval-lm", f"{numbers['fairseq_word_perplexity']:.4f}  {cut}"))
    for unit, name in (("character", "characters"), ("byte", "bytes"), ("source byte", "source_bytes")):
        if name in numbers:
            bits = numbers[f"bits_per_{unit.replace(' ', '_')}"]
            rows.append((f"bits per {unit}", f"{bits:.4f}  over {numbers[name]:,}"))
    if settings["manifest"] is None:
        rows.append(("bits per byte", "-  needs the manifest.json of preprocess/ (--manifest)"))
    return [f"{name:<18} {value}" for name, value in rows]
