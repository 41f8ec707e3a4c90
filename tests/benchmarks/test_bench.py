"""How tables are measured: what comes first, what is counted, and what becomes of rows that fail."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import command, measuring
from benchmarks.device import peak, seconds
from benchmarks.measuring import DiedError, call_in_child, in_child, in_turns, measure
from benchmarks.peers import hidden_bytes
from benchmarks.records import Records
from benchmarks.report import page
from benchmarks.table import TIME, NotInstalledError, Options, ParityError, Row, Table, Work, assert_parity, settled, to
from fairseq_ms.cli import main
from fairseq_ms.core.ops.linear_cross_entropy import linear_cross_entropy
from fairseq_ms.errors import UsageError
from fairseq_ms.tools.saved_bytes import saved_bytes

MACHINE = {"device": "a device", "memory_gb": 80, "torch": "2", "python": "3", "quick": False}
OPTIONS = Options(quick=True, rounds=2, least_seconds=0.0)
MEBIBYTE = 2**20


def raising(error: Exception) -> Callable[[], Work]:
    def build() -> Work:
        raise error

    return build


now = 0.0


def take(seconds: float) -> None:
    """Let the clock of the tests go on; a process that measures has a clock of its own."""
    global now
    now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only ``take`` moves, whatever else the machine does."""
    monkeypatch.setattr("benchmarks.device.time", SimpleNamespace(perf_counter=lambda: now, process_time=lambda: 0.0))


def taking(milliseconds: float) -> Callable[[], Work]:
    return lambda: Work(lambda: take(milliseconds / 1e3), 1, lambda: {"peak": 12_345.0})


def a_table(rows: dict[str, Callable[[], Work]], parity: Callable[[], str] | None = None) -> Table:
    made = [Row((name, "fp16"), build, "fp16") for name, build in rows.items()]
    ratios = {"to fairseq's": lambda settings: to(settings, model="fairseq")}
    columns = {TIME: "ms", "peak": "GB"}
    return Table("a table", "A table", "About it.", ["model", "precision"], columns, made, 1e3, ratios, parity)


def measured(table: Table, options: Options = OPTIONS) -> dict[str, dict]:
    return {record["key"].split(" | ")[1]: record for record in measure(table, table.rows, options)}


def test_rows_take_turns_and_what_warms_up_is_not_counted(clock, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def writing(name: str) -> Work:
        def run() -> None:
            with log.open("a") as file:
                file.write(name)

        return Work(run)

    rows = [Row((name,), lambda name=name: writing(name)) for name in "ab"]
    found = list(in_turns(rows, Options(rounds=3, least_seconds=0.0)))
    assert [[len(values) for values in times.values()] for times, _ in found] == [[1, 1], [2, 2], [3, 3]]
    times, failures = found[-1]
    assert log.read_text() == "aabb" + "ab" * 3
    assert {settings: len(values) for settings, values in times.items()} == {("a",): 3, ("b",): 3}
    assert failures == {}


def test_a_line_for_every_row_whatever_became_of_it(clock) -> None:
    rows = {
        "ours": taking(10),
        "large": raising(MemoryError("10 GB")),
        "other": raising(NotInstalledError("transformers")),
        "broken": raising(RuntimeError("two\nlines")),
        "dies": lambda: Work(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "fairseq": taking(20),
        "later": taking(1),
    }
    table = a_table(rows)
    records = {record["key"]: record for record in measure(table, table.rows[:-1], OPTIONS)}
    lines = page([table], records, MACHINE).splitlines()
    lines = lines[lines.index("## A table") + 4 :]
    assert lines[0] == "| model | precision | ms | ratio to fairseq's | GB |"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:8]]
    ours, fairseq = cells[0], cells[5]
    assert ours[2:] == ["10 (10 .. 10)", "0.500 (0.500 .. 0.500)", "12,345"]
    assert fairseq[2:4] == ["20 (20 .. 20)", "1"]
    assert [line[2] for line in cells[1:5]] == [
        "does not fit",
        "not installed: transformers",
        "failed: RuntimeError: two lines",
        "failed: the process ended with -9",
    ]
    assert lines[8:] == ["", "Rows not measured: 1 (`--list` names them)."]
    assert [settled(records[table.key(row)]) for row in table.rows[:-1]] == [True, True, False, False, False, True]


def test_a_row_that_fails_when_it_is_timed_costs_no_other() -> None:
    def failing() -> None:
        raise RuntimeError("in its round")

    found = measured(a_table({"fairseq": taking(1), "fails": lambda: Work(failing), "ours": taking(1)}))
    assert found["fails"]["failed"] == "RuntimeError: in its round"
    assert len(found["ours"]["numbers"][TIME]) == 2


def test_ratios_are_of_rounds_in_turns_and_else_of_medians() -> None:
    table = a_table({"fairseq": taking(1), "ours": taking(1)})
    ours, theirs = [3.0, 8.0, 5.0], [2.0, 4.0, 5.0]

    def ratio(ours_together: str, theirs_together: str) -> str:
        records = {
            f"a table | {name} | fp16": {"numbers": {TIME: values}, "seconds": 1.0, "together": together}
            for name, values, together in (("ours", ours, ours_together), ("fairseq", theirs, theirs_together))
        }
        (line,) = (line for line in page([table], records, MACHINE).splitlines() if line.startswith("| ours"))
        return line.split("|")[4].strip()

    assert ratio("1", "1") == "1.500 (1.000 .. 2.000)"
    assert ratio("1", "2") == "1.250"


def test_times_are_divided_by_units_and_what_comes_before_is_not_timed(clock) -> None:
    work = Work(lambda: take(0.01), before=lambda: take(0.05))
    assert seconds(work, OPTIONS, repeats=2) == pytest.approx(0.01)
    *_, (times, _) = in_turns([Row(("a",), lambda: Work(lambda: take(0.02), 20))], OPTIONS)
    assert times["a",] == pytest.approx([0.001, 0.001])


def test_the_peak_of_a_process_is_what_was_there_at_once() -> None:
    x = torch.ones(64 * MEBIBYTE // 4, requires_grad=True)

    def both() -> None:
        # Twice the numbers is gone before their gradient is made; pages of libraries come on top.
        (x * 2).sum().backward()
        x.grad = None

    assert call_in_child(lambda: peak(both, OPTIONS)) == pytest.approx(64 * MEBIBYTE, abs=16 * MEBIBYTE)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_what_asks_for_more_memory_than_there_is_does_not_fit() -> None:
    found = measured(a_table({"huge": lambda: Work(lambda: None, 1, lambda: {"peak": torch.ones(2**44).sum().item()})}))
    assert "can't allocate memory" in found["huge"]["does not fit"]


def test_a_child_goes_with_whoever_stops_listening_and_its_death_is_an_error() -> None:
    def pid_and_sleep(send: Callable[[int], None]) -> None:
        send(os.getpid())
        time.sleep(100)

    messages = in_child(pid_and_sleep)
    pid = next(messages)
    messages.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(DiedError, match="ended with -9"):
        call_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_parity_refuses_nan_and_too_large_a_difference() -> None:
    one = torch.zeros(3)
    assert assert_parity("x", one, one + 1e-7, 1e-6) == pytest.approx(1e-7)
    for other in (one + 1e-5, one + torch.nan):
        with pytest.raises(ParityError, match=r"^x: "):
            assert_parity("x", one, other, 1e-6)


def test_a_gradient_made_in_the_forward_pass_counts_as_kept_and_that_of_a_parameter_does_not() -> None:
    features, weight = torch.ones(6, 5, requires_grad=True), torch.ones(9, 5, requires_grad=True)
    target = torch.arange(6)
    loss = linear_cross_entropy(features * 2, weight, target, padding=1)
    kept = saved_bytes(lambda: linear_cross_entropy(features * 2, weight, target, padding=1)) + hidden_bytes(loss)
    logits = saved_bytes(lambda: F.cross_entropy(F.linear(features * 2, weight), target), nn.ParameterList([weight]))
    # Features or their gradient; and the logits' probabilities, the targets and their number.
    assert (kept, logits) == (6 * 5 * 4, (6 * 5 + 6 * 9 + 6 * 2 + 1) * 4)


def test_records_are_of_one_machine_and_half_a_line_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    Records(path, MACHINE).append({"key": "a", "failed": "x", "seconds": 1.0})
    with path.open("a") as file:
        file.write('{"key": "b", "numb')
    records = Records(path, MACHINE)
    records.append({"key": "a", "numbers": {}, "seconds": 1.0})
    assert records.by_key() == {"a": {"key": "a", "numbers": {}, "seconds": 1.0}}
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(UsageError, match="--records must name a file that this machine has written"):
        Records(path, {**MACHINE, "device": "another"})


@pytest.mark.parametrize("content", ["a letter\nto somebody", "no end of line", "[1]\n"])
def test_a_file_of_somebody_else_is_refused_and_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text(content)
    with pytest.raises(UsageError, match="--records must name a file that this command has written"):
        Records(path, MACHINE)
    assert path.read_text() == content


@pytest.fixture
def one_table(monkeypatch: pytest.MonkeyPatch) -> Callable[[Table], None]:
    """The command with this table alone."""

    def only(table: Table) -> None:
        monkeypatch.setattr(command, "tables", lambda options: {table.name: table})

    monkeypatch.setattr(measuring.gc, "freeze", lambda: None)
    return only


def bench(tmp_path: Path, *flags: str) -> tuple[int, list[dict]]:
    found = main(["bench", "a table", "--quick", "--rounds", "1", "--report", str(tmp_path / "page.md"), *flags])
    return found, [json.loads(line) for line in (tmp_path / "page.jsonl").read_text().splitlines()[1:]]


@pytest.fixture(autouse=True)
def path_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts its checkout in front of all others, for its own process."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_nothing_is_measured_when_parity_fails(one_table, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def parity() -> str:
        raise ParityError("they differ by 3")

    one_table(a_table({"ours": raising(AssertionError("measured"))}, parity))
    code, records = bench(tmp_path)
    assert code == 1
    assert [record["key"] for record in records] == ["a table"]
    assert (
        "failed: a table: not measured, since parity failed: ParityError: they differ by 3" in capsys.readouterr().err
    )


def test_a_row_is_written_as_it_is_measured_and_is_settled_by_its_last_round(clock) -> None:
    table = a_table({"fairseq": taking(1), "ours": taking(2)})
    found = list(measure(table, table.rows, Options(rounds=2, least_seconds=0.0)))
    assert [(line["key"].split(" | ")[1], len(line["numbers"].get(TIME, []))) for line in found] == [
        *(("fairseq", 0), ("ours", 0), ("fairseq", 1), ("ours", 1), ("fairseq", 2), ("ours", 2))
    ]
    assert [settled(line) for line in found] == [False] * 4 + [True] * 2
    assert all(line["numbers"]["peak"] == 12_345.0 for line in found)
    shown = page([table], {line["key"]: line for line in found[:4]}, MACHINE)
    assert "| ours | fp16 | 2 (2 .. 2) | 2.000 (2.000 .. 2.000) | 12,345 |" in shown


def test_the_command_goes_on_where_it_ended_with_what_rows_are_divided_by(one_table, tmp_path: Path) -> None:
    def finished(records: list[dict]) -> list[str]:
        return sorted(line["key"].split(" | ")[1] for line in records if "numbers" in line and settled(line))

    one_table(a_table({"fairseq": taking(1), "ours": taking(1), "other": taking(1)}, lambda: "same"))
    assert bench(tmp_path, "--only", "ours", "--alone")[0] == 0
    assert finished(bench(tmp_path, "--only", "ours")[1]) == ["ours"]
    records = bench(tmp_path, "--json", str(tmp_path / "numbers.json"))[1]
    assert finished(records) == ["fairseq", "other", "ours"]
    assert bench(tmp_path)[1] == records
    report = json.loads((tmp_path / "numbers.json").read_text())
    assert report["machine"]["cores"] > 0
    assert len(report["results"]) == 4
    assert "Checked before: same." in (tmp_path / "page.md").read_text()
    assert {entry.name for entry in tmp_path.iterdir()} == {"page.md", "page.jsonl", "numbers.json"}


def test_an_interruption_leaves_a_report_and_no_process(one_table, tmp_path: Path) -> None:
    started = tmp_path / "pid"

    def hanging() -> Work:
        # Not before the parent has passed its fork, whose hooks swallow an interruption.
        time.sleep(1)
        started.write_text(str(os.getpid()))
        time.sleep(100)
        raise AssertionError

    def end() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    one_table(a_table({"hanging": hanging}))
    threading.Thread(target=end, daemon=True).start()
    assert bench(tmp_path)[0] == 130
    assert "Tables not measured" in (tmp_path / "page.md").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
