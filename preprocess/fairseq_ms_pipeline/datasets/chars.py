"""Prepare any tokenised text, WikiText-103's layout included, as characters or bytes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from fairseq_ms_pipeline.cli import add_input_flags, common_parser, job_from_files, run_job
from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.flags import add_flag
from fairseq_ms_pipeline.run import Job

DATASET = Dataset(
    name="chars",
    title="Characters",
    level="char",
    documents="wikitext",
    split_names={
        split: (f"wiki.{split}.tokens", f"{split}.txt", f"{split}/*.txt", f"*.{split}.txt") for split in SPLITS
    },
)


def make_job(args: argparse.Namespace) -> Job:
    """The run of this data set as the flags ask for it."""
    return job_from_files(replace(DATASET, level=args.level), args)


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    parser = common_parser(__doc__)
    add_input_flags(parser, DATASET)
    unit = "a symbol of the model: a character or a byte of UTF-8 (default: %(default)s)"
    add_flag(parser, "--level", "--unit", choices=("char", "byte"), default=DATASET.level, help=unit)
    blank = "an empty line is a lone end of line, or nothing (default: keep)"
    parser.add_argument("--blank-lines", choices=("keep", "drop"), default=DATASET.blank_lines, help=blank)
    parser.add_argument("--dict-size", type=int, help="most frequent symbols to keep (default: all)")
    return run_job(make_job, parser.parse_args())
