"""Prepare any folder, archive or file of your own text: *.txt, JSON, JSON lines, CSV (also compressed), Parquet, or
what `save_to_disk` of Hugging Face's datasets wrote.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fairseq_ms_pipeline import manifest as manifests
from fairseq_ms_pipeline.cli import (
    add_bpe_flags,
    add_input_flags,
    common_parser,
    job_from_files,
    run_job,
    seed_of,
)
from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.datasets.code import NAMES as CODE
from fairseq_ms_pipeline.documents import Reader
from fairseq_ms_pipeline.files import read_json
from fairseq_ms_pipeline.flags import add_flag
from fairseq_ms_pipeline.run import WORK, Job
from fairseq_ms_pipeline.sources import DELIMITED, TABLES, check_inputs, text_files

DATASET = Dataset(
    name="text",
    title="Text",
    bpe_merges=30000,
    tokenise="moses",
    blank_lines="drop",
    documents="ends",
    text_names=("*.txt", "*.tokens"),
    json_names=("*.json", "*.jsonl", *DELIMITED, *TABLES),
    json_fields=("text",),
)


def given_names(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    """By split, the names of its files or folders.

    Hugging Face's data sets have train-00000-of-00002.parquet and a split `validation`.
    """
    return {
        split: tuple(
            start + Path(file).suffix
            for name in ((split, "validation") if split == "valid" else (split,))
            for file in (*dataset.text_names, *dataset.json_names)
            for start in (f"{name}/{Path(file).stem}", name, f"*.{name}", f"{name}-*")
        )
        for split in SPLITS
    }


def with_suffixes(dataset: Dataset, suffixes: list[str]) -> Dataset:
    """One that reads files of more endings as text; ValueError for what is none."""
    wrong = [suffix for suffix in suffixes if not suffix.startswith(".") or "/" in suffix]
    if wrong:
        raise ValueError(f"--suffix must be endings such as .md: got {wrong[0]}.")
    code = [suffix for suffix in suffixes if f"*{suffix}" in CODE]
    if code and dataset.tokenise == "moses":
        what = "loses the spaces that code begins its lines with"
        raise ValueError(f"--suffix {code[0]}: --tokenise moses {what}; give --bpe hf_byte_bpe, or use prepare code.")
    return replace(dataset, text_names=(*dataset.text_names, *(f"*{suffix}" for suffix in suffixes)))


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """What a declaration says for other data sets, said here by flags."""
    others = "endings of more files that are text, such as .md .py"
    parser.add_argument("--suffix", nargs="+", metavar=".ENDING", default=[], help=others)
    parser.add_argument("--level", choices=("bpe", "word"), default=DATASET.level, help="default: %(default)s")
    parser.add_argument(
        "--bpe",
        choices=("subword_nmt", "hf_byte_bpe"),
        help="subword_nmt (default) on words, as in the papers; hf_byte_bpe on bytes: fast, lossless, any language",
    )
    parser.add_argument(
        "--split",
        choices=("auto", "given", "random"),
        default="auto",
        help="given: by the names train, valid and test of files or folders; random: as --documents says; "
        "auto (default): given if all three names are there",
    )
    parser.add_argument("--valid-fraction", type=float, help=f"default: {DATASET.valid_fraction}")
    parser.add_argument("--test-fraction", type=float, help=f"default: {DATASET.test_fraction}")
    parser.add_argument(
        "--documents",
        help="ends (default): split by bytes, into whole files and the ends of those that have over a tenth of all; or "
        "what a random split keeps together: file, blank, line, lines:N, wikitext",
    )
    add_flag(
        parser, "--tokenise", "--tokenize", choices=("moses", "none"), help="default: moses; with hf_byte_bpe: none"
    )
    parser.add_argument("--language", help=f"language of moses (default: {DATASET.language})")
    parser.add_argument("--blank-lines", choices=("keep", "drop"), help="default: drop; with hf_byte_bpe: keep")
    parser.add_argument("--dict-size", type=int, help="most frequent symbols to keep (default: all)")


def is_given(args: argparse.Namespace, dataset: Dataset) -> bool:
    """Whether the split is given by names; ValueError when it must be and one of the splits has no file."""
    if args.split == "random":
        return False
    check_inputs(args.input)
    reader = Reader(replace(dataset, split_names=given_names(dataset)), args.input, seed_of(args))
    found = {reader.given_split(file.name) for file in text_files(args.input, reader.wanted)}
    missing = [split for split in SPLITS if split not in found]
    if missing and args.split == "given":
        raise ValueError(f"--split given: --input has no file or folder named {' or '.join(missing)}.")
    return not missing


def documents_of(out: Path) -> str:
    """How to split where no flag says it: by files in a folder that was begun so, which was the default of 0.2.0."""
    run = next((file for file in (out / manifests.NAME, out / WORK / "plan.json") if file.is_file()), None)
    found = read_json(run) if run is not None else {}
    settings = found.get("settings") if isinstance(found, dict) else None
    return "file" if (settings or {}).get("documents") == "file" else DATASET.documents


def make_job(args: argparse.Namespace) -> Job:
    """The run of this data set as the flags ask for it."""
    dataset = replace(DATASET, level=args.level, documents=documents_of(args.out))
    if args.bpe and args.level != "bpe":
        raise ValueError(f"--bpe has no meaning with the level {args.level}: leave it out.")
    if args.bpe == "hf_byte_bpe":
        dataset = replace(dataset, level=args.bpe, tokenise="none", blank_lines="keep")
    dataset = with_suffixes(replace(dataset, tokenise=args.tokenise or dataset.tokenise), args.suffix)
    if is_given(args, dataset):
        dataset = replace(dataset, split_names=given_names(dataset))
    return job_from_files(dataset, args)


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    parser = common_parser(__doc__)
    add_input_flags(parser, DATASET)
    add_bpe_flags(parser, DATASET)
    add_text_flags(parser)
    return run_job(make_job, parser.parse_args())
