"""Evaluate a checkpoint: subword and word perplexity, bits per byte.

A text's total negative log-likelihood does not depend on what it is divided by. fairseq-eval-lm divides by subwords;
the multi-scale paper (4.1) reports WikiText-103 by dividing by the actual number of words.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import report
from fairseq_ms.tools.arguments import add_counts, add_cpu, add_data, add_outputs, add_window, place
from fairseq_ms_pipeline.files import parsed

if TYPE_CHECKING:
    from fairseq_ms.tools.trained import Trained

# What bits are counted per, by its name in a manifest.
_UNITS = {"bits_per_character": "characters", "bits_per_byte": "bytes", "bits_per_source_byte": "source_bytes"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = (
        "file of fairseq-train, or of plain_pytorch/train.py, or folder that fairseq-ms export wrote (with --data TEXT)"
    )
    parser.add_argument("checkpoint", nargs="?", type=place, metavar="CHECKPOINT", help=help)
    help = "the model that comes with this package, instead of a CHECKPOINT"
    parser.add_argument("--shipped", action="store_true", help=help)
    add_data(parser, "test")
    add_window(parser)
    add_counts(
        parser,
        ("--batch-size", None, "most windows in a batch (default: what --max-tokens has room for)"),
        ("--max-tokens", 36000, "most tokens in a batch"),
    )
    help = "none: running text; eos: every line or image by itself, without context (default: as in training)"
    parser.add_argument("--sample-break-mode", choices=("none", "eos"), help=help)
    parser.add_argument("--fp16", action="store_true", help="half precision")
    add_cpu(parser)
    parser.add_argument("--manifest", type=Path, help="counts of the data (default: manifest.json in or above --data)")
    add_outputs(parser, figure=False)


def run(args: argparse.Namespace) -> None:
    """Evaluate, print the table and write the JSON file."""
    from fairseq_ms.core.ops.device import prefer_flash
    from fairseq_ms.export import exported
    from fairseq_ms.tools import tokenizing

    prefer_flash()  # rows of data have any length
    if args.manifest is not None and not args.manifest.is_file():
        raise UsageError(f"--manifest must be a file: got {args.manifest}")
    if args.shipped != (args.checkpoint is None):
        raise UsageError(f"CHECKPOINT or --shipped must be given, and one alone: got {args.checkpoint or 'none'}")
    if args.shipped:
        args.checkpoint = exported.shipped()
    checkpoint = load(args.checkpoint, args.data, args.cpu, args.tokens_per_sample, args.sample_break_mode)
    if args.fp16:
        checkpoint.model.half()
    scored = evaluate(
        checkpoint, args.gen_subset, args.tokens_per_sample, args.context_window, args.max_tokens, args.batch_size
    )
    data = Path(checkpoint.data)
    if not data.exists():
        # Several folders with shards of the training data, of which the first is scored.
        data = checkpoint.folder
    # Of the training data, a manifest counts both halves.
    uncounted = not data.is_dir() or (data.parent.name, args.gen_subset) == ("halves", "train")
    manifest = args.manifest or (None if uncounted else tokenizing.manifest_of(data))
    counts = split_counts(manifest, args.gen_subset, scored.targets) if manifest else checkpoint.counts
    settings = {
        "checkpoint": args.checkpoint,
        "data": str(data),
        "subset": args.gen_subset,
        "manifest": str(manifest) if manifest else None,
        "window": scored.window,
        "stride": scored.window - scored.context,
    }
    numbers = renormalised(scored, counts)
    _show(settings, numbers)
    folder = args.shipped or Path(args.checkpoint).is_dir()
    if "images" not in counts and (folder or tokenizing.manifest_of(checkpoint.folder) is not None):
        print(f"next: fairseq-ms sample {'' if args.shipped else shlex.quote(args.checkpoint) + ' '}--prompt TEXT")
    if args.json is not None:
        # A line without spaces is one word, whose perplexity may be beyond floating point numbers.
        report.write_json(args.json, {**settings, **numbers}, allow_nan=True)


def load(
    path: str, data: str | None = None, cpu: bool = False, segment: int | None = None, mode: str | None = None
) -> Trained:
    """A checkpoint to be read in segments of another length, if it has a memory, or by line ("eos") or as running text.

    Raises UsageError as ``loading.load`` does.
    """
    from fairseq_ms.export import exported
    from fairseq_ms.tools import loading

    whose = exported if (Path(path) / "config.json").is_file() else loading
    checkpoint = whose.load(path, data, cpu)
    # Blocks of whole lines were for training alone.
    checkpoint.by_line = checkpoint.by_line if mode is None else mode == "eos"
    if segment is not None and checkpoint.streaming:
        checkpoint.in_segments_of(segment)
    return checkpoint


@dataclass(frozen=True)
class Scored:
    """The total negative log-likelihood of a text, and what it was the total of.

    Attributes:
        bits, targets: the total, and of how many
        unfinished: those that end in `@@`; the others are words and ends of line
        cut: windows whose last target is unfinished: fairseq-eval-lm --post-process '@@ ' counts the word that such a
            window cuts in two as two words; None for a stream, which has no windows
        window, context: tokens of a window, and those of them that are only context
    """

    bits: float
    targets: int
    unfinished: int = 0
    cut: int | None = 0
    window: int = 0
    context: int = 0


def evaluate(
    checkpoint: Trained,
    split: str,
    window: int | None = None,
    context: int | None = None,
    max_tokens: int = 36000,
    batch_size: int | None = None,
) -> Scored:
    """Score every token of a split once; window and context are as in ``scoring.check_window`` by default.

    A line that is read by itself is a window of its own, and has no context. Raises UsageError for a window, a line or
    a context that the model cannot be given.
    """
    from fairseq_ms.tools import scoring

    by_line = checkpoint.by_line
    if context and (by_line or checkpoint.streaming):
        raise UsageError(f"--context-window is of running text and of models without a memory: got {context}")
    texts = checkpoint.documents(split)
    lengths = [text.numel() for text in texts]
    if by_line and checkpoint.longest is not None and max(lengths) > checkpoint.longest:
        raise UsageError(
            f"--sample-break-mode eos needs lines of at most the {checkpoint.longest} positions of {checkpoint.label}, "
            f"and --sample-break-mode none cuts longer ones: got a line of {max(lengths)} tokens"
        )
    if by_line or checkpoint.streaming:
        window, context = window or checkpoint.segment, 0
        read = max(lengths)
    else:
        window, context = scoring.check_window(checkpoint, window, context)
        read = window
    room = max_tokens if batch_size is None else min(max_tokens, batch_size * read)
    nll = scoring.score_documents(checkpoint, texts, read, context, room)
    ends = np.array([symbol.endswith("@@") for symbol in checkpoint.dictionary.symbols])
    unfinished = np.concatenate([ends[text.numpy()] for text in texts])
    cut = None
    if by_line or not checkpoint.streaming:
        cut = sum(bool(unfinished[stop - 1]) for _, _, stop in scoring.windows_of(lengths, read, context))
    return Scored(float(nll.sum() / math.log(2)), nll.size, int(unfinished.sum()), cut, window, context)


def split_counts(manifest: Path, subset: str, targets: int) -> dict[str, int]:
    """A split's counts in the manifest of a prepared folder; UsageError when they are not of the data scored."""
    try:
        splits = parsed(manifest.read_text(encoding="utf-8"))["splits"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--manifest must be a manifest.json that preprocess/ wrote: got {manifest} ({error})"
        ) from None
    if subset not in splits:
        raise UsageError(f"--manifest must hold counts of {subset}: {manifest} has {', '.join(splits)}")
    if splits[subset]["targets"] != targets:
        raise UsageError(
            f"--manifest must be of the data that is scored: {manifest} counts {splits[subset]['targets']} targets "
            f"in {subset}, but {targets} were scored"
        )
    return splits[subset]


def renormalised(scored: Scored, counts: Mapping[str, int]) -> dict[str, float]:
    """The same total divided by targets, words and, as far as `counts` has them, characters and bytes."""

    def perplexity(count: int) -> float:
        return 2 ** (scored.bits / count) if scored.bits / count < 1000 else math.inf

    found: dict[str, float] = {
        "targets": scored.targets,
        "bits_per_target": scored.bits / scored.targets,
        "perplexity": perplexity(scored.targets),
    }
    words = scored.targets - scored.unfinished
    # Symbols that no `@@` marks may be bytes or characters.
    if "images" not in counts and ("words_with_eol" in counts or scored.unfinished):
        found["words_with_eol"] = counts.get("words_with_eol", words)
        found["word_perplexity"] = perplexity(counts.get("words_with_eol", words))
    if scored.unfinished and scored.cut is not None:
        found["words_cut_by_blocks"] = scored.cut
        found["fairseq_word_perplexity"] = perplexity(words + scored.cut)
    for unit, name in _UNITS.items():
        if name in counts:
            found[name] = counts[name]
            found[unit] = scored.bits / counts[name]
    return found


def _show(settings: Mapping[str, object], numbers: Mapping[str, float]) -> None:
    rows: dict[str, object] = {
        "checkpoint": settings["checkpoint"],
        "data": f"{settings['data']} ({settings['subset']})",
        "window, stride": f"{settings['window']}, {settings['stride']}",
        "scored targets": f"{numbers['targets']:,}",
        "bits per target": f"{numbers['bits_per_target']:.4f}",
        "perplexity": f"{numbers['perplexity']:.4f}",
    }
    if "word_perplexity" in numbers:
        counted = f"over {numbers['words_with_eol']:,} words and ends of line"
        rows["word perplexity"] = f"{numbers['word_perplexity']:.4f}  {counted}"
    if "fairseq_word_perplexity" in numbers:
        cut = f"{numbers['words_cut_by_blocks']:,} words cut in two by windows count twice there"
        rows["by fairseq-eval-lm"] = f"{numbers['fairseq_word_perplexity']:.4f}  {cut}"
    for unit, name in _UNITS.items():
        if name in numbers:
            rows[unit.replace("_", " ")] = f"{numbers[unit]:.4f}  over {numbers[name]:,}"
    if settings["manifest"] is None and "bits_per_source_byte" not in numbers:
        rows["bits per byte"] = "-  needs the manifest.json of preprocess/ (--manifest)"
    print("\n".join(f"{name:<18} {value}" for name, value in rows.items()))
