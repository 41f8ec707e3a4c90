"""Arguments and outputs that the commands on checkpoints have in common."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairseq_ms.analysis.checkpoints import Checkpoint


REMOVE_BPE = "join pieces of words, all but the last of which end in SYMBOL (default of SYMBOL: '@@ ')"


def add_checkpoints(parser: argparse.ArgumentParser, split: str = "test") -> None:
    """Which checkpoints to ask, about which data, on which device."""
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="[LABEL=]CHECKPOINT",
        help="file that fairseq-train wrote; the label names it in table and figure (default: its folder's name)",
    )
    parser.add_argument("--data", help="folder that fairseq-preprocess wrote (default: the one trained on)")
    parser.add_argument("--gen-subset", default=split, help=f"split of the data (default: {split})")
    parser.add_argument(
        "--max-tokens", type=positive, default=8192, metavar="N", help="tokens in a batch (default: 8192)"
    )
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU although there is a CUDA device")


def add_flag(parser: argparse._ActionsContainer, name: str, *hidden: str, **settings: Any) -> None:
    """A flag that other names stand for as well, which no help shows: older ones, or those of other spellings."""
    flag = parser.add_argument(name, **settings)
    parser.add_argument(
        *hidden, **{**settings, "dest": flag.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    )


def add_outputs(parser: argparse.ArgumentParser, figure: bool = True) -> None:
    """Where results go beside the table."""
    parser.add_argument("--json", metavar="FILE", help="write all results to a JSON file")
    if figure:
        parser.add_argument("--png", metavar="FILE", help="write the figure")


def add_model(parser: argparse.ArgumentParser, paper: str) -> None:
    """One model, as a checkpoint or by fairseq's flags, or the paper's own."""
    parser.usage = f"{parser.prog} (--arch ARCH [FLAGS OF FAIRSEQ-TRAIN ...] | --path CHECKPOINT | --paper) [OPTIONS]"
    parser.add_argument("--path", metavar="CHECKPOINT", help="take the model of a checkpoint")
    parser.add_argument("--paper", action="store_true", help=paper)


def check_model(args: argparse.Namespace) -> None:
    """Raise UsageError when more than one of these is given."""
    from fairseq_ms.errors import UsageError

    given = args.fairseq_flags[0] if args.fairseq_flags else "--path" if args.path and args.paper else None
    if args.paper and given:
        raise UsageError(f"--paper prints the paper's models alone: {given} must not be given with it")
    if args.path and given:
        raise UsageError(f"--path brings its own flags: {given} must not be given with it")


def add_window(parser: argparse.ArgumentParser) -> None:
    """The evaluation window, spelled as in fairseq-eval-lm."""
    parser.add_argument(
        "--tokens-per-sample",
        type=positive,
        metavar="N",
        help="window in tokens of models without a memory (default: as in training)",
    )
    parser.add_argument(
        "--context-window",
        type=int,
        metavar="N",
        help="tokens of it that are only context; the rest is the stride (default: half the window)",
    )


def check_window_is_used(args: argparse.Namespace, loaded: list[Checkpoint]) -> None:
    """Raise UsageError when a window is given and no model has one."""
    from fairseq_ms.errors import UsageError

    given = args.tokens_per_sample if args.tokens_per_sample is not None else args.context_window
    if given is not None and all(checkpoint.streaming for checkpoint in loaded):
        raise UsageError(
            f"--tokens-per-sample and --context-window are of models without a memory: {loaded[0].label} reads "
            f"the text once, got {given}"
        )


def positive(text: str) -> int:
    """argparse type of whole numbers from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: got {text!r}")
    return int(text)


def positive_list(text: str) -> list[int]:
    """argparse type of comma separated whole numbers from 1."""
    return [positive(item.strip()) for item in text.split(",")]


def load_checkpoints(args: argparse.Namespace) -> list[Checkpoint]:
    """The checkpoints of the command line, on the data of the command line."""
    from fairseq_ms.analysis import checkpoints

    quieten()
    return checkpoints.load_all(args.checkpoints, args.data, args.cpu)


def quieten() -> None:
    """Keep fairseq's progress messages out of the table; warnings still come through."""
    logging.getLogger("fairseq").setLevel(logging.WARNING)


def write_results(args: argparse.Namespace, loaded: list[Checkpoint], results: object) -> None:
    """Write the JSON file, if there is to be one: the settings, the checkpoints and the results."""
    from fairseq_ms.analysis import report

    if args.json is None:
        return
    settings = {
        name: value for name, value in vars(args).items() if name not in ("command", "json", "png", "checkpoints")
    }
    described = [checkpoint.describe() for checkpoint in loaded]
    report.write_json(
        args.json, {"command": args.command, "settings": settings, "checkpoints": described, "results": results}
    )


def check_checkpoint(path: str, flag: str = "CHECKPOINT") -> None:
    """Raise UsageError unless a checkpoint's path is that of a file."""
    from fairseq_ms.errors import UsageError

    if Path(path).is_file():
        return
    problem = "does not exist"
    if Path(path).is_dir():
        names = ("checkpoint_best.pt", "checkpoint_last.pt", "*.pt")
        inside = [file for name in names for file in sorted(Path(path).glob(name))]
        problem = f"is a folder: did you mean {inside[0]}?" if inside else "is a folder without a checkpoint"
    raise UsageError(f"{flag} must be a file that fairseq-train wrote: {path} {problem}")


def split_label(spec: str) -> tuple[str, str]:
    """``"name=dir/file.pt"`` as ("name", "dir/file.pt"); without a name, the folder's name is the label.

    A file whose own path has an equals sign in it needs no name.
    """
    label, separator, path = spec.partition("=")
    if separator and label and "/" not in label and not Path(spec).is_file():
        return label, path
    return Path(spec).parent.name or Path(spec).stem, spec
