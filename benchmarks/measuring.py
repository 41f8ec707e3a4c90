"""How rows are measured: each by itself for its memory, then all of a cohort in turns for their times."""

from __future__ import annotations

import gc
import importlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.device import prepare, ran_out, seconds
from benchmarks.table import ABSENT, DOES_NOT_FIT, FAILED, NUMBERS, TIME, NotInstalledError, Options, Record, Row, Table

# A child has all libraries at once, and shares nothing that it computes. Whoever calls must not have started CUDA.
FORK = multiprocessing.get_context("fork")
Send = Callable[[Any], None]


class DiedError(Exception):
    """A process ended in the middle of its work."""


def get_ready() -> None:
    """Import what the first step of a model imports, and leave what is there to the collectors of no child."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    gc.collect()
    gc.freeze()


def in_child(body: Callable[[Send], None]) -> Generator[Any, None, None]:
    """What ``body(send)`` sends, run in a process of its own; raises DiedError if that dies.

    The process goes with whoever stops listening to it.
    """
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_body, args=(body, theirs), daemon=False)
    process.start()
    theirs.close()
    try:
        while True:
            try:
                yield ours.recv()
            except EOFError:
                break
        process.join()
    finally:
        process.kill()
        process.join()
    if process.exitcode:
        raise DiedError(f"the process ended with {process.exitcode}")


def _body(body: Callable[[Send], None], connection: Connection) -> None:
    try:
        body(connection.send)
    except KeyboardInterrupt:
        # The parent was interrupted as well, and says so.
        os._exit(130)


def call_in_child(function: Callable[[], Any]) -> Any:
    """What a function returns or raises in a process of its own."""

    def body(send: Send) -> None:
        try:
            send((function(), None))
        except Exception as error:
            send((None, error))

    ((result, error),) = in_child(body)
    if error is not None:
        raise error
    return result


def failure(error: BaseException) -> Record:
    """What a record says of a row that has no numbers."""
    if isinstance(error, NotInstalledError):
        return {ABSENT: str(error)}
    died = isinstance(error, DiedError)
    why = str(error) if died else f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return {DOES_NOT_FIT if ran_out(error) else FAILED: why}


def measure(table: Table, rows: Sequence[Row], options: Options) -> Iterator[Record]:
    """Records of these rows of a cohort: one as soon as anything is measured, one after every round, and the last."""
    numbers: dict[str, dict[str, Any]] = {}
    took: dict[str, float] = {}
    timed = []

    def record(key: str, **more: Any) -> Record:
        return {"key": key, NUMBERS: dict(numbers[key]), "seconds": round(took[key], 1), **more}

    for row in rows:
        began, key = time.perf_counter(), table.key(row)
        try:
            numbers[key] = call_in_child(partial(_other_columns, row, options))
        except Exception as error:
            yield {"key": key, **failure(error), "seconds": round(time.perf_counter() - began, 1)}
            continue
        took[key] = time.perf_counter() - began
        timed.append(row)
        yield record(key, **({"unfinished": True} if TIME in table.columns else {}))
    if TIME not in table.columns:
        return
    began, load, before = time.perf_counter(), os.getloadavg()[0], dict(took)
    together = {"together": f"{time.time():.0f}"}
    for times, failures in in_turns(timed, options):
        share = (time.perf_counter() - began) / max(1, len(timed))
        took = {key: seconds + share for key, seconds in before.items()}
        for settings, said in failures.items():
            key = " | ".join((table.name, *settings))
            if numbers.pop(key, None) is not None:
                yield {"key": key, **said, "seconds": round(took[key], 1)}
        for settings, values in times.items():
            key = " | ".join((table.name, *settings))
            numbers[key][TIME] = [table.scale * value for value in values]
            more = {"unfinished": True} if len(values) < options.rounds else {}
            yield record(key, **together, load=[round(load, 1), round(os.getloadavg()[0], 1)], **more)


def _other_columns(row: Row, options: Options) -> dict[str, Any]:
    prepare(options)
    return dict(row.build().others())


Times = dict[tuple[str, ...], list[float]]


def in_turns(rows: Sequence[Row], options: Options) -> Iterator[tuple[Times, dict[tuple[str, ...], Record]]]:
    """Seconds a unit in every round so far, by settings, and what became of rows that failed; after every round.

    Rows take turns, so that whatever else the machine does falls on all of them. One that fails costs no other: the
    others start again without it.
    """
    left, failures = list(rows), dict[tuple[str, ...], Record]()
    while left:
        at, times = left[0], Times()
        try:
            for what, said in in_child(lambda send: _rounds(left, options, send)):
                if what == "at":
                    at = left[said]
                elif what == "failed":
                    failures[at.settings] = said
                else:
                    times = said
                    yield times, failures
        except DiedError as died:
            failures[at.settings] = failure(died)
        if times and min(map(len, times.values())) == options.rounds:
            return
        failures.setdefault(at.settings, {FAILED: "the process ended without a word"})
        left.remove(at)
    yield {}, failures


def _rounds(rows: Sequence[Row], options: Options, send: Send) -> None:
    """Build all work, warm up, and time it; sends where it is, after every round all times, and what went wrong."""
    try:
        prepare(options)
        works, repeats = [], []
        for number, row in enumerate(rows):
            send(("at", number))
            works.append(row.build())
            first = seconds(works[-1], options)
            # What is compiled or allocated at first would let work look longer than it is.
            first = seconds(works[-1], options) if first < 1.0 else first
            repeats.append(max(1, math.ceil(options.least_seconds / max(first, 1e-6))))
        times: Times = {row.settings: [] for row in rows}
        for _ in range(options.rounds):
            for number, (row, work, count) in enumerate(zip(rows, works, repeats)):
                send(("at", number))
                times[row.settings].append(seconds(work, options, count) / work.units)
            send(("times", times))
    except Exception as error:
        send(("failed", failure(error)))
