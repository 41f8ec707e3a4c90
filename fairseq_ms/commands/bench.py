"""Measure memory and time against naive twins and other implementations (needs a checkout)."""

import argparse
import importlib
import os
import sys
from pathlib import Path

from fairseq_ms.errors import UsageError
from fairseq_ms.tools.arguments import add_choice, add_counts, register


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables to measure, or all (default: list them)")
    add_choice(parser, "--device", ("cpu", "cuda"), "where models run")
    add_counts(parser, ("--rounds", 7, "timed rounds"), ("--threads", None, "CPU threads (default: torch's choice)"))
    what = "cpu: the process's own processor time, for machines that others use as well"
    add_choice(parser, "--clock", ("wall", "cpu"), what)
    help = "measure only rows with this in their names (repeatable)"
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help=help)
    help = "without the rows that their times are divided by"
    parser.add_argument("--alone", action="store_true", help=help)
    parser.add_argument("--list", action="store_true", help="print the names of all rows, and measure nothing")
    parser.add_argument("--report", metavar="FILE", help="write a page of all tables to FILE as well")
    help = "write rows to FILE as they are measured, and go on from there (default: beside the report, as .jsonl)"
    parser.add_argument("--records", metavar="FILE", help=help)
    help = "tiny shapes, to see that everything runs; the numbers mean nothing"
    parser.add_argument("--quick", action="store_true", help=help)
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE as well")


def run(args: argparse.Namespace) -> int:
    """Print a table for every section; the exit code is 1 if a parity check failed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "command.py").is_file():
        raise UsageError(
            f"bench needs the folder benchmarks of a checkout beside the package, and there is none in {root}: "
            "clone the repository and install it with pip install -e ."
        )
    # Asking whether there is a GPU must not start CUDA here: the processes that measure are forked from this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    register()
    # In front, so that whatever else is installed under the name is not taken for these benchmarks.
    sys.path.insert(0, str(root))
    return int(importlib.import_module("benchmarks.command").run(args))
