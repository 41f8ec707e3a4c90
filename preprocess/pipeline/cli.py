"""The command line that every `prepare.py` shares."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from preprocess.pipeline.dataset import Dataset
from preprocess.pipeline.documents import Reader
from preprocess.pipeline.run import Job, run
from preprocess.pipeline.sources import check_inputs, total_bytes

# Raw text, its tokenised, segmented and binarised forms, and the published copies, as measured on English
# novels.
DISK_PER_INPUT_BYTE = 5


def common_parser(description: str) -> argparse.ArgumentParser:
    """The flags of every data set."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to make: bin/, text/, manifest.json")
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=cores, help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of a random split (default: %(default)s)")
    parser.add_argument("--vocab-from", type=Path, help="use codes and dictionary of this prepared folder")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def add_bpe_flags(parser: argparse.ArgumentParser, dataset: Dataset) -> None:
    """The flags of data sets that are segmented by BPE."""
    parser.add_argument("--bpe-merges", type=int, default=dataset.bpe_merges, help="default: %(default)s")
    parser.add_argument(
        "--bpe-sample-mb", type=float, default=dataset.bpe_sample_bytes / 1e6,
        help="learn BPE on at most this much training text, evenly spread (default: %(default)s)",
    )  # fmt: skip


def add_input_flags(parser: argparse.ArgumentParser, dataset: Dataset) -> None:
    """The flags of data sets that are read from files."""
    parser.add_argument("--input", type=Path, nargs="+", default=[], help="file, archive or folder")
    parser.add_argument(
        "--shard-mb", type=float, default=dataset.shard_bytes / 1e6,
        help="text handled at a time by one process, which bounds memory (default: %(default)s)",
    )  # fmt: skip


FIELDS: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "bpe_merges": lambda value: ("bpe_merges", value),
    "bpe_sample_mb": lambda value: ("bpe_sample_bytes", int(value * 1e6)),
    "shard_mb": lambda value: ("shard_bytes", int(value * 1e6)),
    "level": lambda value: ("level", value),
    "tokenise": lambda value: ("tokenise", value),
    "language": lambda value: ("language", value),
    "documents": lambda value: ("documents", value),
    "blank_lines": lambda value: ("blank_lines", value),
    "valid_fraction": lambda value: ("valid_fraction", value),
    "test_fraction": lambda value: ("test_fraction", value),
    "dict_size": lambda value: ("dictionary_size", value),
}


def with_flags(dataset: Dataset, args: argparse.Namespace) -> Dataset:
    """The declaration with what the user's flags change in it."""
    changes = dict(change(getattr(args, flag)) for flag, change in FIELDS.items() if hasattr(args, flag))
    changed = replace(dataset, **changes)
    changed.check()
    return changed


def job_from_files(dataset: Dataset, args: argparse.Namespace) -> Job:
    """The run that reads a data set from `--input`."""
    dataset = with_flags(dataset, args)
    check_inputs(args.input)
    identity = {
        "inputs": [{"name": path.name, "bytes": total_bytes([path])} for path in args.input],
        "seed": args.seed,
    }
    return Job(
        dataset=dataset,
        source=Reader(dataset, args.input, args.seed),
        source_bytes=total_bytes(args.input),
        out=args.out,
        workers=args.workers,
        identity=identity,
        vocabulary_from=args.vocab_from,
        quiet=args.quiet,
    )


def plan(job: Job) -> str:
    """What a run would do, for `--dry-run`."""
    dataset = job.dataset
    there = next(folder for folder in (job.out, *job.out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    lines = [f"{dataset.title} -> {job.out} (nothing is written by --dry-run)"]
    if job.source_bytes is not None:
        need = DISK_PER_INPUT_BYTE * job.source_bytes
        lines.append(f"  input:      {job.source_bytes / 1e6:,.1f} MB on disk")
        lines.append(f"  disk:       about {need / 1e6:,.0f} MB if uncompressed, {free / 1e6:,.0f} MB free")
    given = ", ".join(f"{split}: {' '.join(names)}" for split, names in dataset.split_names.items())
    fractions = f"valid {dataset.valid_fraction:g}, test {dataset.test_fraction:g}"
    drawn = f"{fractions} of documents ({dataset.documents})"
    lines.append(f"  split:      {given or drawn}")
    lines.append(f"  tokenise:   {dataset.tokenise}, empty lines: {dataset.blank_lines}")
    if job.vocabulary_from:
        lines.append(f"  vocabulary: of {job.vocabulary_from}")
    elif dataset.level == "bpe":
        lines.append(
            f"  vocabulary: {dataset.bpe_merges:,} BPE operations learnt on at most "
            f"{dataset.bpe_sample_bytes / 1e6:,.0f} MB of train"
        )
    else:
        lines.append("  vocabulary: words of train")
    lines.append(f"  workers:    {job.workers}, shards of {dataset.shard_bytes / 1e6:g} MB")
    lines.append(f"  writes:     bin/ (fairseq), text/ (tokenised), manifest.json in {job.out}")
    return "\n".join(lines)


def main(make_job: Callable[[argparse.Namespace], Job], args: argparse.Namespace) -> int:
    """Run the job, or print its plan; the exit code is 2 and the message one sentence when the user must mend
    it.
    """
    try:
        job = make_job(args)
        if args.dry_run:
            print(plan(job))
        else:
            run(job)
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    return 0
