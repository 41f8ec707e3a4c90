"""`python -m benchmarks.gpu`: measure what has not been measured yet, and write the report."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.device import DEVICES
from benchmarks.gpu.records import Records
from benchmarks.gpu.report import report
from benchmarks.gpu.rows import FAILED, Table, settled
from benchmarks.gpu.tables import tables
from benchmarks.gpu.worker import START_AGAIN, facts
from fairseq_ms.analysis.report import write_text
from fairseq_ms.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    found = argparse.ArgumentParser("python -m benchmarks.gpu", description="Test and measure everything on a GPU.")
    found.add_argument(
        "--report", type=Path, default=ROOT / "docs" / "results_gpu.md", metavar="FILE",
        help="what to write (default: docs/results_gpu.md)",
    )  # fmt: skip
    found.add_argument(
        "--records", type=Path, metavar="FILE", help="rows as they are measured (default: beside the report, as .jsonl)"
    )
    found.add_argument(
        "--only", action="append", default=[], metavar="TEXT",
        help="measure the rows with this in their names alone; may be given several times",
    )  # fmt: skip
    found.add_argument("--list", action="store_true", help="print the names of all rows, and measure nothing")
    found.add_argument("--device", choices=list(DEVICES), default="cuda", help="cpu: with --quick, to try it out")
    found.add_argument("--quick", action="store_true", help="tiny shapes; the numbers mean nothing")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if no row has failed, 1 if one has, 2 on bad input, and 130 if it was interrupted."""
    args = parser().parse_args(arguments)
    try:
        return _run(args)
    except UsageError as error:
        print(f"benchmarks.gpu: error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    chosen = tables(args.quick)
    if args.list:
        print("\n".join(table.key(row) for table in chosen for row in table.rows))
        return 0
    if args.device == "cpu" and not args.quick:
        raise UsageError("--device cpu must be given with --quick, since at the papers' sizes a CPU takes days")
    device = DEVICES[args.device]()
    if not args.report.resolve().parent.is_dir():
        raise UsageError(f"--report must lie in a folder that exists: got {args.report}")
    keys = wanted(chosen, args.only)
    machine = facts(device, args.quick)
    records = Records((args.records or args.report.with_suffix(".jsonl")).resolve(), machine)
    known = records.by_key()
    open_keys = [key for key in keys if key not in known or not settled(known[key])]
    # Ended by whoever starts it, it leaves a report as well, and no process behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    stopped = False
    try:
        measure(open_keys, records, args.device, args.quick)
    except KeyboardInterrupt:
        stopped = True
    finally:
        signal.signal(signal.SIGTERM, before)
    known = records.by_key()
    write_text(args.report, report(chosen, known, machine))
    print(f"wrote {args.report}")
    if stopped:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    failed = [key for key in keys if FAILED in known.get(key, {})]
    for key in failed:
        print(f"failed: {key}: {known[key][FAILED]}", file=sys.stderr)
    return 1 if failed else 0


def wanted(chosen: Sequence[Table], only: Sequence[str]) -> list[str]:
    """The keys of all rows, or of those with one of these texts in them; UsageError if there is none."""
    keys = [table.key(row) for table in chosen for row in table.rows]
    found = [key for key in keys if not only or any(text in key for text in only)]
    if not found:
        raise UsageError(f"--only must be part of a row's name, which --list prints: got {' '.join(only)}")
    return found


def measure(keys: Sequence[str], records: Records, device: str, quick: bool) -> None:
    """Run workers until each of these rows has a line; the row at which a process dies has failed."""
    left = list(keys)
    since = records.count()
    while left:
        flags = [str(records.path), "--device", device, *(["--quick"] if quick else [])]
        program = [sys.executable, "-m", "benchmarks.gpu.worker", *flags]
        with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, text=True) as worker:
            try:
                worker.communicate(json.dumps(left))
            except KeyboardInterrupt:
                worker.terminate()
                worker.wait()
                raise
        done = records.by_key(since)
        left = [key for key in left if key not in done]
        if worker.returncode != START_AGAIN and left:
            records.append({"key": left.pop(0), FAILED: f"the process ended with {worker.returncode}", "seconds": 0.0})


if __name__ == "__main__":
    raise SystemExit(main())
