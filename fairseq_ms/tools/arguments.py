"""Flags that several commands have, and what is made of them."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from fairseq_ms.errors import UsageError, missing_package
from fairseq_ms_pipeline.flags import add_flag, place

# How a text is drawn where nothing else is said.
DRAWN = {"temperature": 0.8, "top_k": 40}


def add_counts(parser: argparse.ArgumentParser, *flags: tuple[str, int | None, str]) -> None:
    """Flags of whole numbers from 1: name, default and help, which is made to end in the default.

    Hidden aliases follow the name, separated by spaces.
    """
    for names, default, text in flags:
        help = text if default is None else f"{text} (default: {default})"
        add_flag(parser, *names.split(), type=positive, default=default, metavar="N", help=help)


def add_list(parser: argparse.ArgumentParser, name: str, *hidden: str, **settings: Any) -> None:
    """A flag of comma separated whole numbers from 1."""
    add_flag(parser, name, *hidden, type=positive_list, metavar="N,N,...", **settings)


def add_choice(parser: argparse.ArgumentParser, name: str, choices: tuple[str, ...], text: str) -> None:
    """A flag of a few words, of which the first is the default."""
    parser.add_argument(name, choices=choices, default=choices[0], help=f"{text} (default: {choices[0]})")


def add_checkpoints(parser: argparse.ArgumentParser, origin: str = "fairseq-train wrote") -> None:
    """Which checkpoints to ask."""
    help = f"file that {origin}; the label names it in table and figure (default: its folder's name)"
    parser.add_argument("checkpoints", nargs="+", type=place, metavar="[LABEL=]CHECKPOINT", help=help)


def add_scored(parser: argparse.ArgumentParser, split: str = "test") -> None:
    """Which checkpoints to ask about which data, on which device."""
    add_checkpoints(parser)
    add_data(parser, split)
    add_counts(parser, ("--max-tokens", 8192, "tokens in a batch"))
    add_cpu(parser)


def add_data(parser: argparse.ArgumentParser, split: str = "") -> None:
    """Which data, and which split of it if one is asked about."""
    parser.add_argument("--data", type=place, help="folder that fairseq-preprocess wrote (default: the one trained on)")
    if split:
        parser.add_argument("--gen-subset", default=split, help=f"split of the data (default: {split})")


def add_cpu(parser: argparse.ArgumentParser) -> None:
    """Where models run."""
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even where there is a GPU")


def add_seed(parser: argparse.ArgumentParser, what: str) -> None:
    """The seed of what is drawn at random."""
    parser.add_argument("--seed", type=seed, default=1, help=f"of {what} (default: 1)")


def add_remove_bpe(parser: argparse.ArgumentParser) -> None:
    """How pieces of words are marked."""
    help = "join pieces of words, all but the last of which end in SYMBOL (default of SYMBOL: '@@ ')"
    parser.add_argument("--remove-bpe", metavar="SYMBOL", nargs="?", const="@@ ", help=help)


def add_outputs(parser: argparse.ArgumentParser, figure: bool = True) -> None:
    """Where results go beside the table."""
    parser.add_argument("--json", metavar="FILE", help="write all results to a JSON file")
    if figure:
        parser.add_argument("--png", metavar="FILE", help="write the figure")


def add_model(parser: argparse.ArgumentParser, others: str = "") -> None:
    """One model, as a checkpoint or by fairseq's flags, or what else the command has, such as " | --paper"."""
    parser.usage = f"{parser.prog} (--arch ARCH [FLAGS OF FAIRSEQ-TRAIN ...] | --path CHECKPOINT{others}) [OPTIONS]"
    parser.set_defaults(fairseq_flags=[])
    parser.add_argument("--path", type=place, metavar="CHECKPOINT", help="take the model of a checkpoint")


def check_model(args: argparse.Namespace) -> None:
    """Raise UsageError when both are given."""
    if args.path and args.fairseq_flags:
        raise UsageError(f"--path brings its own flags: {args.fairseq_flags[0]} must not be given with it")


def add_window(parser: argparse.ArgumentParser) -> None:
    """The evaluation window, spelled as in fairseq-eval-lm."""
    help = "window, or segment of a memory, in tokens (default: as in training)"
    add_counts(parser, ("--tokens-per-sample", None, help))
    help = "context in each window; the rest is the stride (default: half the window, 0 for models with a memory)"
    parser.add_argument("--context-window", type=int, metavar="N", help=help)


def positive(text: str) -> int:
    """argparse type of whole numbers from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """argparse type of the seeds that both numpy and torch take."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}: got {text!r}")
    return int(text)


def positive_list(text: str) -> list[int]:
    """argparse type of comma separated whole numbers from 1."""
    return [positive(item.strip()) for item in text.split(",")]


def register() -> None:
    """Register all models with fairseq, of whose messages only warnings are shown from here on.

    Raises UsageError, saying what to run, where fairseq is missing.
    """
    import fairseq_ms

    try:
        fairseq_ms.register()
    except ImportError as error:
        raise UsageError(missing_package(error, "this command") or str(error)) from error
    logging.getLogger("fairseq").setLevel(logging.WARNING)


def check_checkpoint(path: str, flag: str = "CHECKPOINT") -> None:
    """Raise UsageError unless a checkpoint's path is that of a file."""
    if Path(path).is_file():
        return
    is_folder, names = Path(path).is_dir(), ("checkpoint_best.pt", "checkpoint_last.pt", "*.pt")
    folder = Path(path) if is_folder else Path(path).parent
    inside = [file for name in names for file in sorted(folder.glob(name))]
    problem = "is a folder" if is_folder else "does not exist"
    # The best one is there after the first validation.
    hint = f": did you mean {inside[0]}?" if inside else " without a checkpoint" if is_folder else ""
    raise UsageError(f"{flag} must be a file that training wrote: {path} {problem}{hint}")


def split_label(spec: str) -> tuple[str, str]:
    """``"name=dir/file.pt"`` as ("name", "dir/file.pt"); without a name, the folder's name is the label.

    A file whose own path has an equals sign in it needs no name.
    """
    label, separator, path = spec.partition("=")
    if separator and label and "/" not in label and not Path(spec).is_file():
        return label, path
    return Path(spec).parent.name or Path(spec).stem, spec
