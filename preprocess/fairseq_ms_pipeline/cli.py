"""The command line that every `prepare.py` shares."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from fairseq_ms_pipeline import flags
from fairseq_ms_pipeline.dataset import CODES, NUMBERED, Dataset
from fairseq_ms_pipeline.documents import Line, Reader
from fairseq_ms_pipeline.download import fetch
from fairseq_ms_pipeline.run import Job, run, with_any_tokenizer
from fairseq_ms_pipeline.sources import check_inputs, identity_of, matches, text_files, total_bytes

# Tokenised, segmented and binarised text and the published copies, as measured on English novels.
DISK_PER_INPUT_BYTE = 5
SEED = 1


class Parser(flags.Parser):
    """Says of a mistake one sentence, without its usage."""

    def error(self, message: str) -> NoReturn:
        flag = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, 1, 0.8)
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help says more"
        self.exit(2, f"{self.prog}: error: {message} ({hint})\n")


def run_parser(description: str | None, made: str) -> argparse.ArgumentParser:
    """The flags of every data set, text or images."""
    parser = Parser(description=description)
    parser.add_argument("--out", type=Path, required=True, help=f"folder to make: {made}")
    parser.add_argument("--seed", type=int, help=f"seed of a random split (default: {SEED})")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def common_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every data set of text."""
    parser = run_parser(description, "bin/, text/, manifest.json")
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=cores, help="processes (default: %(default)s)")
    help = "use codes and dictionary of this prepared or imported folder, or those of Hugging Face's tokenizer.json"
    parser.add_argument("--vocab-from", type=Path, metavar="FOLDER", help=help)
    return parser


def add_bpe_flags(parser: argparse.ArgumentParser, dataset: Dataset) -> None:
    """The flags of data sets that are segmented by BPE."""
    parser.add_argument("--bpe-merges", type=int, help=f"operations (default: {dataset.bpe_merges})")
    parser.add_argument(
        "--bpe-sample-mb",
        type=float,
        help="learn BPE on at most this much training text, evenly spread "
        f"(default: {dataset.bpe_sample_bytes / 1e6:g})",
    )


def add_input_flags(parser: argparse.ArgumentParser, dataset: Dataset) -> None:
    """The flags of data sets that are read from files."""
    parser.add_argument("--input", type=Path, nargs="+", default=[], help="file, archive or folder")
    if dataset.json_fields:
        fields = " and ".join(dataset.json_fields)
        parser.add_argument("--column", help=f"field of JSON or column of a table with the text (default: {fields})")
    if dataset.downloads:
        parser.add_argument("--download", type=Path, metavar="FOLDER", help="fetch the file into FOLDER first")
    parser.add_argument(
        "--shard-mb",
        type=float,
        help=f"text handled at a time by one process, which bounds memory (default: {dataset.shard_bytes / 1e6:g})",
    )


def megabytes(value: float) -> float:
    """Whole bytes in so many megabytes; infinity and NaN as they are, which ``Dataset.check`` refuses."""
    found = value * 1e6
    return int(found) if math.isfinite(found) else found


# Which field of the declaration a flag changes, and how.
FIELDS: dict[str, tuple[str, Callable]] = {
    "bpe_merges": ("bpe_merges", int),
    "bpe_sample_mb": ("bpe_sample_bytes", megabytes),
    "shard_mb": ("shard_bytes", megabytes),
    "column": ("json_fields", lambda name: (name,)),
    "tokenise": ("tokenise", str),
    "language": ("language", str),
    "documents": ("documents", str),
    "blank_lines": ("blank_lines", str),
    "valid_fraction": ("valid_fraction", float),
    "test_fraction": ("test_fraction", float),
    "dict_size": ("dictionary_size", int),
}


def with_flags(dataset: Dataset, args: argparse.Namespace) -> Dataset:
    """The declaration with what the user's flags change in it."""
    given = {flag for flag in (*FIELDS, "seed") if getattr(args, flag, None) is not None}
    changes = {FIELDS[flag][0]: FIELDS[flag][1](getattr(args, flag)) for flag in given - {"seed"}}
    changed = replace(dataset, **changes)
    # First, since what follows needs a package.
    changed.check()
    if args.vocab_from is not None:
        changed = with_any_tokenizer(changed, args.vocab_from)
    for idle, names, reason in (
        (changed.level not in CODES, ("bpe_merges", "bpe_sample_mb"), f"with the level {changed.level}"),
        (changed.level in NUMBERED, ("dict_size",), "with --bpe hf_byte_bpe"),
        (args.vocab_from, ("bpe_merges", "bpe_sample_mb", "dict_size"), "with --vocab-from"),
        (changed.tokenise == "none", ("language",), "with --tokenise none"),
        (changed.split_names, ("valid_fraction", "test_fraction", "seed"), "where the split is given by names"),
    ):
        meaningless = sorted(given.intersection(names)) if idle else []
        if meaningless:
            raise ValueError(f"--{meaningless[0].replace('_', '-')} has no meaning {reason}: leave it out.")
    return changed


def seed_of(args: argparse.Namespace) -> int:
    """The seed that the user gave, or the usual one."""
    return SEED if args.seed is None else args.seed


def job_of(
    args: argparse.Namespace,
    dataset: Dataset,
    lines: Callable[[Callable[[int], object]], Iterable[Line]],
    source_bytes: int | None = None,
    **identity: object,
) -> Job:
    """The run that the flags of all data sets ask for; the other arguments are as in `Job`."""
    identity["seed"] = seed_of(args)
    return Job(dataset, lines, source_bytes, args.out, args.workers, identity, args.vocab_from, args.quiet)


def job_from_files(dataset: Dataset, args: argparse.Namespace) -> Job:
    """The run that reads a data set from `--input`, or from what `--download` fetches.

    ValueError when neither is given, or a path does not exist.
    """
    dataset = with_flags(dataset, args)
    inputs = list(args.input)
    if getattr(args, "download", None):
        if inputs:
            raise ValueError("--input and --download exclude each other: one of them says where the data is.")
        if args.dry_run:
            sources = ", ".join(source.url for source in dataset.downloads)
            raise ValueError(f"--dry-run does not fetch: --download {args.download} would try {sources}.")
        inputs = [fetch(dataset.downloads, args.download, args.quiet)]
    check_inputs(inputs)
    reader = Reader(dataset, inputs, seed_of(args))
    if getattr(args, "column", None) and not any(
        matches(file.name, dataset.json_names) for file in text_files(inputs, reader.wanted)
    ):
        raise ValueError(f"--column {args.column} has no meaning where --input has no JSON or table: leave it out.")
    return job_of(args, dataset, reader.lines, total_bytes(inputs), inputs=[*map(identity_of, inputs)])


def plan(job: Job) -> str:
    """What a run would do, for `--dry-run`."""
    dataset = job.dataset
    rows = {}
    if job.source_bytes is not None:
        there = next(folder for folder in (job.out, *job.out.absolute().parents) if folder.exists())
        need, free = DISK_PER_INPUT_BYTE * job.source_bytes, shutil.disk_usage(there).free
        rows["input"] = f"{job.source_bytes / 1e6:,.1f} MB on disk"
        rows["disk"] = f"about {need / 1e6:,.0f} MB if uncompressed, {free / 1e6:,.0f} MB free"
    given = ", ".join(f"{split}: {' '.join(names)}" for split, names in dataset.split_names.items())
    fractions = f"valid {dataset.valid_fraction:g}, test {dataset.test_fraction:g}"
    whole = (
        "bytes: whole files, and the ends of long ones"
        if dataset.documents == "ends"
        else f"documents ({dataset.documents})"
    )
    rows["split"] = given or f"{fractions} of {whole}"
    rows["tokenise"] = f"{dataset.tokenise}, empty lines: {dataset.blank_lines}"
    most = f"{dataset.bpe_sample_bytes / 1e6:,.0f} MB of train"
    learnt = f"{dataset.bpe_merges:,} BPE operations learnt on at most {most}"
    own = learnt if dataset.level in CODES else f"every {dataset.level} of train"
    rows["vocabulary"] = f"of {job.vocabulary_from}" if job.vocabulary_from else own
    rows["workers"] = f"{job.workers}, shards of {dataset.shard_bytes / 1e6:g} MB"
    rows["writes"] = f"bin/ (fairseq), text/ (tokenised), manifest.json in {job.out}"
    title = f"{dataset.title} -> {job.out} (nothing is written by --dry-run)"
    return "\n".join([title, *(f"  {name + ':':<12}{what}" for name, what in rows.items())])


def one_sentence(action: Callable[[], None]) -> int:
    """Run `action` and return the exit code; for what the user must mend, one sentence on stderr and code 2.

    Where nobody reads on, as in `... | head`, it ends in silence with 141.
    """
    try:
        action()
        sys.stdout.flush()
    except BrokenPipeError:
        # What Python flushes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("FAIRSEQ_MS_TRACEBACK"):
            traceback.print_exc()
        told: object = error
        if isinstance(error, OSError) and error.filename is not None:
            told = f"{error.filename} cannot be read or written: {error.strerror}."
        print(f"{Path(sys.argv[0]).name}: error: {told}", file=sys.stderr)
        return 2
    return 0


def run_or_plan(job: Job, dry_run: bool) -> None:
    """Run the job, or print its plan."""
    if dry_run:
        job.check()
        print(plan(job))
    else:
        run(job)


def run_job(make_job: Callable[[argparse.Namespace], Job], args: argparse.Namespace) -> int:
    """Run the job, or print its plan with --dry-run; returns the exit code."""
    return one_sentence(lambda: run_or_plan(make_job(args), args.dry_run))


def prepare_files(description: str, variants: Mapping[str, Dataset], flag: str = "", help: str = "") -> int:
    """The whole `main` of a data set read from files; `flag` chooses one of several variants, the first by default."""
    default = next(iter(variants))
    parser = common_parser(description)
    add_input_flags(parser, variants[default])
    if any(dataset.level == "bpe" for dataset in variants.values()):
        add_bpe_flags(parser, next(dataset for dataset in variants.values() if dataset.level == "bpe"))
    if flag:
        choices = list(variants)
        parser.add_argument(flag, dest="variant", choices=choices, default=default, help=help)
    args = parser.parse_args()
    return run_job(lambda args: job_from_files(variants[args.variant if flag else default], args), args)
