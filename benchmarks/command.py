"""What `fairseq-ms bench` runs once it has found this folder: the benchmarks asked for, one after the other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks.report import machine, table
from benchmarks.runner import Benchmark, Options, discover, run_sections
from fairseq_ms.analysis.report import write_json
from fairseq_ms.errors import UsageError

# Long enough that starting, and caches gone cold in between, do not show.
LEAST_SECONDS = 0.25
# The benchmarks that have a loss.
TRAINING = ("train-memory", "train-speed")


def run(args: argparse.Namespace) -> int:
    """List the benchmarks, or run those named; 1 if a parity check failed, else 0."""
    found = discover()
    if not args.names:
        width = max(map(len, found))
        for name, benchmark in found.items():
            print(f"{name:<{width}}  {benchmark.HELP}")
        return 0
    unknown = [name for name in args.names if name not in found]
    if unknown:
        raise UsageError(f"NAME must be one of {', '.join(found)}: got {unknown[0]!r}")
    elsewhere = [name for name in args.names if name not in TRAINING]
    if elsewhere and (args.vocabulary is not None or args.criterion is not None):
        raise UsageError(
            f"--vocabulary and --criterion are for {' and '.join(TRAINING)}: got them with {elsewhere[0]!r}"
        )
    return _measure([found[name] for name in args.names], args)


def _measure(benchmarks: Sequence[Benchmark], args: argparse.Namespace) -> int:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    options = Options(
        rounds=args.rounds,
        quick=args.quick,
        only=tuple(args.only),
        sections=tuple(args.section),
        clock=args.clock,
        least_seconds=0.0 if args.quick else LEAST_SECONDS,
        vocabulary=args.vocabulary,
        criterion=args.criterion or "cross_entropy",
    )
    facts = machine()
    print("  ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{args.rounds} interleaved rounds, {args.clock} time")
    if args.quick:
        print("tiny shapes: the numbers mean nothing")
    results: list[dict[str, object]] = []
    failed = False
    for benchmark in benchmarks:
        for result in run_sections(benchmark.sections(options), options):
            print(f"\n{benchmark.NAME}: {table(result)}", flush=True)
            results.append({"benchmark": benchmark.NAME, **result})
            failed |= "error" in result
    if args.json:
        settings = {"rounds": args.rounds, "clock": args.clock, "quick": args.quick}
        write_json(args.json, {"machine": facts, "results": results, **settings}, allow_nan=True)
    return 1 if failed else 0
