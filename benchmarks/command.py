"""What `fairseq-ms bench` runs once it has found this folder: tables are measured, printed and written down."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.device import facts
from benchmarks.measuring import call_in_child, get_ready, measure
from benchmarks.records import Records
from benchmarks.report import PARITY, markdown, page
from benchmarks.table import FAILED, TIME, Options, Row, Table, settled
from benchmarks.tables import by_value, tables
from fairseq_ms.errors import UsageError
from fairseq_ms.tools.report import write_json, write_text


def run(args: argparse.Namespace) -> int:
    """List the tables, or measure those named; 0, 1 if a row or a check failed, 130 if it was interrupted."""
    options = Options(args.device, args.quick, args.rounds, args.clock, 0.0 if args.quick else 0.25, args.threads)
    found = tables(options)
    names = list(found) if args.names == ["all"] else args.names
    unknown = [name for name in names if name not in found]
    if unknown:
        raise UsageError(f"NAME must be all or one of {', '.join(found)}: got {unknown[0]!r}")
    chosen = [found[name] for name in dict.fromkeys(names or ([] if not args.list else list(found)))]
    if args.list:
        print("\n".join(table.key(row) for table in chosen for row in table.rows))
        return 0
    if not names:
        width = max(map(len, found))
        print("\n".join(f"{name:<{width}}  {table.title}" for name, table in found.items()))
        return 0
    wanted = [
        (table, kept)
        for table, rows in by_value(chosen, options)
        if (kept := [row for row in rows if not args.only or any(text in table.key(row) for text in args.only)])
    ]
    if not wanted:
        raise UsageError(f"--only must be part of a row's name, which --list prints: got {' '.join(args.only)}")
    return _measure(wanted, list(found.values()), options, args)


def _measure(
    wanted: Sequence[tuple[Table, list[Row]]], everything: list[Table], options: Options, args: argparse.Namespace
) -> int:
    get_ready()
    machine = call_in_child(partial(facts, options))
    path = Path(args.records) if args.records else Path(args.report).with_suffix(".jsonl") if args.report else None
    records = Records(path, machine)
    print("  ".join(f"{key}: {value}" for key, value in machine.items()))
    print(f"{options.rounds} rounds in turns" + (", tiny shapes: the numbers mean nothing" if options.quick else ""))
    # Ended by whoever starts it, it leaves a report as well, and no process behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    stopped = False
    try:
        for table, rows in wanted:
            _cohort(table, rows, records, options, args.alone)
    except KeyboardInterrupt:
        stopped = True
    finally:
        signal.signal(signal.SIGTERM, before)
    known = records.by_key()
    if args.report:
        write_text(args.report, page(everything, known, machine))
        print(f"wrote {args.report}")
    if args.json:
        write_json(args.json, {"machine": machine, "rounds": options.rounds, "results": list(known.values())})
    if stopped:
        print("interrupted: with --records, the same command goes on from here", file=sys.stderr)
        return 130
    keys = {table.name for table, _ in wanted} | {table.key(row) for table, rows in wanted for row in rows}
    failed = [key for key in known if key in keys and FAILED in known[key]]
    for key in failed:
        print(f"failed: {key}: {known[key][FAILED]}", file=sys.stderr)
    return 1 if failed else 0


def _cohort(table: Table, rows: list[Row], records: Records, options: Options, alone: bool) -> None:
    """Measure the rows of a cohort that nothing is known of, and unless ``alone`` those that they are divided by.

    Prints them all.
    """
    known = records.by_key()
    left = [row for row in rows if not settled(known.get(table.key(row), {}))]
    if not left:
        return
    print(f"\n{table.title}: {table.about}", flush=True)
    if table.parity is not None and PARITY not in known.get(table.name, {}):
        try:
            records.append({"key": table.name, PARITY: call_in_child(table.parity), "seconds": 0.0})
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            records.append({"key": table.name, FAILED: f"not measured, since parity failed: {why}", "seconds": 0.0})
    said = records.by_key().get(table.name, {})
    if FAILED in said:
        print(said[FAILED])
        return
    if PARITY in said:
        print(f"Checked before: {said[PARITY]}.")
    compared = table.compared_with(left) if TIME in table.columns and not alone else left
    load = None
    for record in measure(table, compared, options):
        records.append(record)
        load = record.get("load", load)
    if load is not None:
        print(f"Load average {load[0]} before the rounds, {load[1]} after.")
    shown = list({row.settings: row for row in [*compared, *rows]}.values())
    print("\n".join(["", *markdown(table, shown, records.by_key())]), flush=True)
