"""`fairseq-ms bench`: run the benchmarks of a checkout's `benchmarks` folder."""

import argparse
import importlib
import logging
import os
import sys
from pathlib import Path

import fairseq_ms
from fairseq_ms.errors import UsageError

# Registered here, after the environment is set that torch's threads read when they start.
NEEDS_FAIRSEQ = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: list them)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="timed rounds (default: 7)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: time that the process had a processor, for machines that others use as well (default: wall)",
    )
    for flag, what in (
        ("--only", "contestants with this in their name, and the baseline"),
        ("--section", "sections with this in their title"),
    ):
        help = f"keep {what}; may be given several times"
        parser.add_argument(flag, action="append", default=[], metavar="TEXT", help=help)
    parser.add_argument(
        "--vocabulary", type=int, metavar="N", help="symbols, in the benchmarks of training (default: 8000)"
    )
    parser.add_argument(
        "--criterion",
        choices=["cross_entropy", "linear_cross_entropy"],
        help="how our models compute their loss in the benchmarks of training (default: cross_entropy, as fairseq's)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, to see that everything runs; the numbers mean nothing"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE as well")


def run(args: argparse.Namespace) -> int:
    """Print a table for every section; the exit code is 1 if a parity check failed."""
    for flag, least in (("rounds", 1), ("threads", 1), ("vocabulary", 8)):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise UsageError(f"--{flag} must be at least {least}: got {value}")
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise UsageError(f"--json must name a file in a folder that exists: got {args.json!r}")
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "runner.py").is_file():
        raise UsageError(
            f"bench needs the folder benchmarks of a checkout beside the package, and there is none in {root}: "
            "clone the repository and install it with pip install -e ."
        )
    if args.clock == "cpu":
        # On a machine that others use, threads that wait for each other awake take the processor from the very
        # thread they wait for: a step then takes twenty times as long and measures nothing. On a quiet one, waking
        # them costs up to as much as the work.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Benchmarks build models by the dozen, and fairseq logs every one of them.
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    fairseq_ms.register()
    # In front, so that whatever else is installed under the name is not taken for these benchmarks.
    sys.path.insert(0, str(root))
    return int(importlib.import_module("benchmarks.command").run(args))
