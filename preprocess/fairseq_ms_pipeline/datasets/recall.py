"""Make exercises in recalling a symbol at a controlled distance, without network."""

from __future__ import annotations

import argparse
import platform
from dataclasses import asdict, replace

from fairseq_ms_pipeline.cli import common_parser, job_of, one_sentence, run_or_plan, seed_of, with_flags
from fairseq_ms_pipeline.dataset import Dataset
from fairseq_ms_pipeline.files import write_json
from fairseq_ms_pipeline.flags import add_flag
from fairseq_ms_pipeline.recall import ASKING, FILLERS, TASKS, Exercises, Recall
from fairseq_ms_pipeline.run import Job

DATASET = Dataset(name="recall", title="Recall at a distance", level="word", shard_bytes=4_000_000)
# Symbols of running text; others become <unk>, which is as good a filler.
WORDS_OF_DOCS = 2000
NUMBERS = {
    "longest": "greatest distance in tokens",
    "values": "different symbols that can be asked for; chance is 1 in so many",
    "pairs": "pairs of a line (--exercise pairs)",
    "passage": "symbols of a passage (--exercise copy)",
    "tokens": "about so many training tokens",
    "test_tokens": "about so many test tokens",
}


def recall_of(args: argparse.Namespace) -> Recall:
    """The exercises that the flags ask for; ValueError for a flag that cannot work or has no meaning."""
    given = {name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None}
    for task, name in (("pairs", "pairs"), ("copy", "passage")):
        if args.exercise != task and name in given:
            raise ValueError(f"--{name} has no meaning with --exercise {args.exercise}: leave it out.")
    if args.exercise == "pairs" and args.ask == "suddenly":
        raise ValueError(
            "--ask suddenly has no meaning with --exercise pairs, where the key announces it: leave it out."
        )
    ask = args.ask or ("announced" if args.exercise == "pairs" else Recall.ask)
    recall = Recall(task=args.exercise, filler=args.filler, ask=ask, **given)
    recall.check()
    return recall


def make_job(args: argparse.Namespace, recall: Recall) -> Job:
    """The run of this data set as the flags ask for it."""
    size = WORDS_OF_DOCS if recall.filler == "docs" else 0
    dataset = replace(with_flags(DATASET, args), dictionary_size=size)
    lines, python = Exercises(recall, seed_of(args)).lines, platform.python_version() if size else None
    return job_of(args, dataset, lines, recall=asdict(recall), python=python)


def prepare(args: argparse.Namespace) -> None:
    """Write the data set and, beside it, what an analysis has to know of the exercises."""
    recall = recall_of(args)
    run_or_plan(make_job(args, recall), args.dry_run)
    if not args.dry_run:
        write_json(args.out / "bin" / "recall.json", recall.description())


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    parser = common_parser(__doc__ or "")
    add_flag(parser, "--exercise", "--task", choices=TASKS, default=TASKS[0], help="default: %(default)s")
    parser.add_argument("--filler", choices=FILLERS, default=FILLERS[0], help="between (default: %(default)s)")
    asking = "whether a symbol stands before an answer (default: suddenly; --exercise pairs: announced)"
    parser.add_argument("--ask", choices=ASKING, help=asking)
    for name, help in NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, help=f"{help} (default: {getattr(Recall, name)})")
    args = parser.parse_args()
    return one_sentence(lambda: prepare(args))
