"""Measuring on a GPU, run through on a CPU at tiny shapes: its calls of CUDA alone have a twin here."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import device_tests, timing, train_mem, worker
from benchmarks.gpu.device import CpuTwin
from benchmarks.gpu.records import Records
from benchmarks.gpu.report import report
from benchmarks.gpu.rows import Cell, NotInstalledError, Row, Table, run_row, settled
from benchmarks.gpu.tables import tables
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.registry import PRESETS
from tests.helpers.cli import run_cli
from tests.models.test_transfo_xl_parity import peer as the_peer

MACHINE = {"device": "a device", "memory_gb": 80, "torch": "2", "python": "3", "quick": False}
# A fixture: the folder of the package that has TransfoXL.
peer = the_peer
TABLES = [table.name for table in tables(quick=True)]


class SmallDevice(CpuTwin):
    """A device that has room for so many rows, each of a hundred bytes beside ten of weights."""

    def __init__(self, memory: int = 10**9) -> None:
        super().__init__()
        self.memory = memory
        self.asked: list[int] = []

    def peak_of(self, rows: int) -> int:
        self.asked.append(rows)
        if 10 + 100 * rows > self.memory:
            raise MemoryError(f"{rows} rows")
        return 10 + 100 * rows


@pytest.mark.parametrize("name", TABLES)
def test_every_row_can_be_measured(name: str) -> None:
    (table,) = (table for table in tables(quick=True) if table.name == name)
    device, records = CpuTwin(), {}
    for row in table.rows:
        record = run_row(table.key(row), row, device)
        assert "numbers" in record or "not installed" in record, record
        assert set(record.get("numbers", {})) <= set(table.columns), record
        records[record["key"]] = record
    page = report([table], records, MACHINE)
    assert "not measured" not in page
    assert all(line.count("|") == len(table.settings) + len(table.columns) + 1 + bool(table.compared)
               for line in page.splitlines() if line.startswith("|"))  # fmt: skip


@pytest.mark.slow
def test_peers_are_measured_where_they_are_installed(peer: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    flags = ("-m", "benchmarks.gpu", "--quick", "--device", "cpu", "--report", page)
    run_cli("python", *flags, "--only", "TransfoXL", "--only", "GPT-2", env={"PYTHONPATH": str(peer)}, timeout=1200.0)
    lines = [line for line in page.read_text().splitlines() if line.startswith(("| TransfoXL", "| Hugging Face"))]
    assert len(lines) == 10
    assert not [line for line in lines if "not " in line or "failed" in line]


def test_every_preset_of_tables_2_to_4_has_the_papers_number() -> None:
    assert set(train_mem.presets()) == set(train_mem.PAPER)
    (table,) = train_mem.tables(quick=False)
    assert [row.settings[0] for row in table.rows] == train_mem.presets()
    assert all(PRESETS[name].table in ("Table 2", "Table 3", "Table 4") for name in train_mem.PAPER)


@pytest.mark.parametrize(("memory", "expected"), [(10**9, 512), (100_000, 896), (5_000, 40), (250, 2), (120, 1)])
def test_the_largest_batch_fits_and_is_nearly_all_that_fits(memory: int, expected: int) -> None:
    device = SmallDevice(memory)
    rows, peak = timing.largest_batch(device, device.peak_of, 512 if memory == 10**9 else 4096)
    assert (rows, peak) == (expected, 10 + 100 * expected)
    assert len(device.asked) <= 12


def test_a_batch_that_fits_less_than_foreseen_is_made_smaller() -> None:
    device = SmallDevice(10_000)

    def peak_of(rows: int) -> int:
        return device.peak_of(rows if rows <= 8 else 2 * rows)

    rows, _ = timing.largest_batch(device, peak_of, 4096)
    assert 40 <= rows <= 49


def test_not_even_one_row_does_not_fit() -> None:
    device = SmallDevice(50)
    row = Row(("model",), lambda at: {"rows": timing.largest_batch(at, device.peak_of, 64)[0]})
    assert run_row("a", row, device)["does not fit"] == "MemoryError: 1 rows"


def test_an_error_that_is_no_lack_of_memory_is_not_taken_for_one() -> None:
    def broken(rows: int) -> int:
        if rows > 1:
            raise ZeroDivisionError("rows")
        return 1

    with pytest.raises(ZeroDivisionError):
        timing.largest_batch(SmallDevice(), broken, 64)


def test_a_loss_that_is_not_finite_is_a_failure() -> None:
    model = torch.nn.Linear(2, 1)

    def loss_of(module: torch.nn.Module, sample: Mapping[str, object]) -> torch.Tensor:
        return model(torch.ones(2)).sum() * torch.nan

    with pytest.raises(ValueError, match="the loss is not finite"):
        timing.training_numbers(CpuTwin(), model, lambda rows: {"ntokens": rows}, loss_of, timing.QUICK)


def a_table(*rows: tuple[str, Callable[[], Mapping[str, Cell]]]) -> Table:
    made = [Row((name, "fp16"), lambda device, measure=measure: measure()) for name, measure in rows]
    columns = {"time": "ms", "peak": "GB"}
    return Table("a table", "A table", "About it.", ["model", "precision"], columns, made, "time", "fairseq")


def raising(error: Exception) -> Callable[[], Mapping[str, Cell]]:
    def measure() -> Mapping[str, Cell]:
        raise error

    return measure


def test_the_report_has_a_line_for_every_row_whatever_became_of_it() -> None:
    table = a_table(
        ("fairseq", lambda: {"time": [4.0, 3.5, 5.0], "peak": 12_345.0}),
        ("ours", lambda: {"time": [3.0, 2.5, 3.5], "peak": "does not fit"}),
        ("large", raising(MemoryError("10 GB"))),
        ("other", raising(NotInstalledError("transformers"))),
        ("broken", raising(RuntimeError("two\nlines"))),
        ("later", lambda: {}),
    )
    records = {}
    for row in table.rows[:-1]:
        record = run_row(table.key(row), row, CpuTwin())
        records[record["key"]] = record
    lines = report([table], records, MACHINE).splitlines()
    assert lines[lines.index("## A table") + 4 :] == [
        "| model | precision | ms | ratio | GB |",
        "| --- | --- | --- | --- | --- |",
        "| fairseq | fp16 | 4 (3.5 .. 5) | 1.000 | 12,345 |",
        "| ours | fp16 | 3 (2.5 .. 3.5) | 0.750 | does not fit |",
        "| large | fp16 | does not fit |  |  |",
        "| other | fp16 | not installed: transformers |  |  |",
        "| broken | fp16 | failed: RuntimeError: two lines |  |  |",
        "",
        "Rows not measured: 1 (`--list` names them).",
    ]
    assert [settled(record) for record in records.values()] == [True, True, True, False, False]


def test_the_page_in_docs_is_what_its_records_say() -> None:
    docs = Path(__file__).parents[2] / "docs"
    first, *lines = map(json.loads, (docs / "results_gpu.jsonl").read_text().splitlines())
    page = report(tables(quick=False), {line["key"]: line for line in lines}, first["machine"])
    assert (docs / "results_gpu.md").read_text() == page


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


def test_a_process_that_dies_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path / "records.jsonl", MACHINE)
    # In place of the worker: it measures rows until it comes to one at which it dies, or asks for a new process.
    program = tmp_path / "worker.py"
    program.write_text(
        "import json, os, sys\n"
        "for key in json.load(sys.stdin):\n"
        "    if key == 'dies':\n"
        "        os.abort()\n"
        "    with open(sys.argv[-3] if '--quick' not in sys.argv else sys.argv[-4], 'a') as file:\n"
        "        file.write(json.dumps({'key': key, 'numbers': {}, 'seconds': 0.0}) + '\\n')\n"
        f"    if key == 'again':\n        sys.exit({worker.START_AGAIN})\n"
    )
    popen = command.subprocess.Popen
    monkeypatch.setattr(
        command.subprocess, "Popen", lambda line, **rest: popen([sys.executable, str(program), *line[3:]], **rest)
    )
    command.measure(["first", "again", "dies", "last"], records, "cpu", quick=False)
    found = records.by_key()
    assert list(found) == ["first", "again", "dies", "last"]
    assert found["dies"]["failed"] == "the process ended with -6"
    assert all("numbers" in found[key] for key in ("first", "again", "last"))


def test_an_interruption_ends_the_worker_and_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "pid"
    program = tmp_path / "worker.py"
    program.write_text(f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n")
    popen = command.subprocess.Popen
    monkeypatch.setattr(command.subprocess, "Popen", lambda line, **rest: popen([sys.executable, str(program)], **rest))

    def end() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    page = tmp_path / "page.md"
    threading.Thread(target=end, daemon=True).start()
    assert command.main(["--quick", "--device", "cpu", "--only", "retina", "--report", str(page)]) == 130
    assert "Tables not measured" in page.read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_worker_whose_device_answers_no_more_asks_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = a_table(("one", raising(RuntimeError("illegal access"))), ("two", lambda: {"time": 1.0}))
    monkeypatch.setattr(worker, "tables", lambda quick: [table])
    keys = [table.key(row) for row in table.rows]
    records = Records(tmp_path / "records.jsonl", MACHINE)
    monkeypatch.setattr(worker, "_answers", lambda device: False)
    assert worker.work(keys, records, CpuTwin(), quick=True) == worker.START_AGAIN
    assert list(records.by_key()) == keys[:1]
    monkeypatch.undo()
    monkeypatch.setattr(worker, "tables", lambda quick: [table])
    assert worker.work(keys, records, CpuTwin(), quick=True) == 0
    assert list(records.by_key()) == keys


def test_the_command_goes_on_where_it_ended(tmp_path: Path) -> None:
    page, lines = tmp_path / "page.md", tmp_path / "page.jsonl"
    flags = ("-m", "benchmarks.gpu", "--quick", "--device", "cpu", "--report", page)
    first, second = "context | Transformer-XL, 8 layers | 4 | fp16", "context | Transformer-XL, 8 layers | 4 | bf16"
    run_cli("python", *flags, "--only", first)
    assert [json.loads(line).get("key") for line in lines.read_text().splitlines()] == [None, first]
    text = page.read_text()
    assert text.count("\n| Transformer-XL, 8 layers | 4 | ") == 1
    assert "Rows not measured: 5 (" in text
    assert "Tables not measured, with their rows: Tests on the device (1); " in text
    run_cli("python", *flags, "--only", first, "--only", second)
    assert [json.loads(line).get("key") for line in lines.read_text().splitlines()] == [None, first, second]
    assert {entry.name for entry in tmp_path.iterdir()} == {"page.md", "page.jsonl"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA device not to be there")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "--device cuda needs a GPU: torch"),
        (("--device", "cpu"), "--device cpu must be given with --quick"),
        (("--device", "cpu", "--quick", "--only", "nothing"), "--only must be part of a row's name"),
        (("--device", "cpu", "--quick", "--report", "no/folder/x.md"), "--report must lie in a folder that exists"),
    ],
)
def test_bad_input_and_no_device_are_one_sentence(
    flags: tuple[str, ...], sentence: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    records = () if "--records" in flags else ("--records", str(tmp_path / "records.jsonl"))
    assert command.main([*flags, *records]) == 2
    said = capfd.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_tests_take_the_device_that_they_are_given(pytestconfig: pytest.Config) -> None:
    assert torch.ones(1).device.type == pytestconfig.getoption("device")
    assert torch.nn.Linear(1, 1).weight.device.type == pytestconfig.getoption("device")


def test_the_option_reaches_every_test() -> None:
    here = f"{Path(__file__).relative_to(Path.cwd())}::test_tests_take_the_device_that_they_are_given"
    for processes in ("0", "1"):
        run_cli("python", "-m", "pytest", "-q", here, "--device", "meta", "-n", processes)


def test_failures_on_the_device_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("def test_good():\n    pass\n\ndef test_bad():\n    assert False\n")
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--device')\n")
    monkeypatch.setattr(device_tests, "ROOT", tmp_path)
    with pytest.raises(AssertionError, match="1 of 2 fail: test_bad"):
        device_tests.run_tests(CpuTwin(), "test_one.py", jobs=0)
    with pytest.raises(AssertionError, match="pytest ended with 4"):
        device_tests.run_tests(CpuTwin(), "test_two.py", jobs=0)
