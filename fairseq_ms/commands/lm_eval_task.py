"""Write a task of lm-evaluation-harness over a text file."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", type=Path, help="text file (UTF-8), which is scored as one text")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the task, for lm_eval's --include_path")
    parser.add_argument("--name", default="text", help="of the task, for lm_eval's --tasks (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    if not re.fullmatch(r"\w+", args.name):
        raise UsageError(f"--name must consist of letters, digits and underscores: got {args.name!r}")
    if not args.text.is_file():
        raise UsageError(f"TEXT must be a file: got {args.text}")
    try:
        text = args.text.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"TEXT must be UTF-8: {args.text} is not (byte {error.start})") from None
    if not text.endswith("\n"):
        raise UsageError(f"TEXT must end in a line end, as its prepared data does: {args.text} does not")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name}.yaml"
    report.write_text(path, task_text(args.name, args.text.resolve()))
    print(path)


def task_text(name: str, text: Path) -> str:
    """The task: one document, all of the file, and its perplexity by word and by byte."""
    import yaml

    task = {
        "task": name,
        "dataset_path": "text",
        "dataset_kwargs": {"data_files": {"test": str(text)}, "sample_by": "document"},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        "metadata": {"version": 1.0},
    }
    return yaml.safe_dump(task, sort_keys=False, allow_unicode=True)
