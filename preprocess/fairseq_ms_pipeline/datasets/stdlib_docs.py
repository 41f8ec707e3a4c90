"""Make a small English corpus of the Python standard library's documentation, without network."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from functools import partial

from fairseq_ms_pipeline.cli import add_bpe_flags, common_parser, job_of, run_job, seed_of, with_flags
from fairseq_ms_pipeline.dataset import Dataset
from fairseq_ms_pipeline.documents import Line
from fairseq_ms_pipeline.prose import sentences
from fairseq_ms_pipeline.run import Job
from fairseq_ms_pipeline.stdlib_docs import corpus, library_folder, split_by_module

DATASET = Dataset(
    name="stdlib_docs",
    title="Documentation of the Python standard library",
    bpe_merges=4000,
    tokenise="moses",
    shard_bytes=200_000,
)


def documentation(seed: int, advance: Callable[[int], object]) -> Iterator[Line]:
    """The sentences of the library's documentation, one a line, each with the split of its module."""
    texts = corpus(library_folder(), sentences)
    splits = split_by_module(texts, seed, DATASET.valid_fraction)
    for name, lines in texts.items():
        for index, line in enumerate(lines):
            advance(len(line.encode()) + 1)
            yield Line(splits[name], index == 0, line)


def make_job(args: argparse.Namespace) -> Job:
    """The run of this data set as the flags ask for it."""
    lines = partial(documentation, seed_of(args))
    return job_of(args, with_flags(DATASET, args), lines, python=platform.python_version())


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    parser = common_parser(__doc__)
    add_bpe_flags(parser, DATASET)
    return run_job(make_job, parser.parse_args())
