"""`fairseq-ms bench`: run the benchmarks of a checkout's `benchmarks` folder."""

import argparse
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import fairseq_ms
from fairseq_ms.errors import UsageError

NAME = "bench"
HELP = "measure memory and time against naive twins and other implementations (needs a checkout)"
# Registered here, after the environment is set that torch's threads read when they start.
NEEDS_FAIRSEQ = False
# Long enough that starting, and caches gone cold in between, do not show.
LEAST_SECONDS = 0.25


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
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="keep contestants with this in their name, and the baseline; may be given several times",
    )
    parser.add_argument(
        "--section",
        action="append",
        default=[],
        metavar="TEXT",
        help="keep sections with this in their title; may be given several times",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, to see that everything runs; the numbers mean nothing"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE as well")


def run(args: argparse.Namespace) -> int:
    """Print a table for every section; the exit code is 1 if a parity check failed."""
    if args.rounds < 1:
        raise UsageError(f"--rounds must be at least 1: got {args.rounds}")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads must be at least 1: got {args.threads}")
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise UsageError(f"--json must name a file in a folder that exists: got {args.json!r}")
    runner = _runner(args.clock)
    found = runner.discover()
    if not args.names:
        width = max(map(len, found))
        for name, module in found.items():
            print(f"{name:<{width}}  {module.HELP}")
        return 0
    unknown = [name for name in args.names if name not in found]
    if unknown:
        raise UsageError(f"NAME must be one of {', '.join(found)}: got {unknown[0]!r}")
    return _measure(runner, [found[name] for name in args.names], args)


def _runner(clock: str) -> Any:
    """`benchmarks.runner` of the checkout that this package lies in."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "runner.py").is_file():
        raise UsageError(
            f"bench needs the folder benchmarks of a checkout beside the package, and there is none in {root}: "
            "clone the repository and install it with pip install -e ."
        )
    if clock == "cpu":
        # On a machine that others use, threads that wait for each other awake take the processor from the very
        # thread they wait for: a step then takes twenty times as long and measures nothing. On a quiet one, waking
        # them costs up to as much as the work.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Benchmarks build models by the dozen, and fairseq logs every one of them.
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    fairseq_ms.register()
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.runner")


def _measure(runner: Any, modules: list[Any], args: argparse.Namespace) -> int:
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    options = runner.Options(
        rounds=args.rounds,
        quick=args.quick,
        only=tuple(args.only),
        sections=tuple(args.section),
        clock=args.clock,
        least_seconds=0.0 if args.quick else LEAST_SECONDS,
    )
    report: dict[str, Any] = {"machine": runner.machine(), "results": []}
    report |= {"rounds": args.rounds, "clock": args.clock, "quick": args.quick}
    print("  ".join(f"{key}: {value}" for key, value in report["machine"].items()))
    print(f"{args.rounds} interleaved rounds, {args.clock} time")
    if args.quick:
        print("tiny shapes: the numbers mean nothing")
    failed = False
    for module in modules:
        for result in runner.run_sections(module.sections(options), options):
            print(f"\n{module.NAME}: {runner.table(result)}", flush=True)
            report["results"].append({"benchmark": module.NAME, **result})
            failed |= "error" in result
    if args.json:
        _write_json(Path(args.json), report)
    return 1 if failed else 0


def _write_json(path: Path, report: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial{os.getpid()}")
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
