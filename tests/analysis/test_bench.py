"""The benchmark runner: what it counts, that parity comes first, and what `fairseq-ms bench` says."""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.losses import hidden_bytes
from benchmarks.memory import resident_growth, resident_peak
from benchmarks.report import table
from benchmarks.runner import (
    Contestant,
    Options,
    ParityError,
    Section,
    assert_parity,
    discover,
    measure_section,
    run_sections,
)
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.cli import main
from fairseq_ms.core.ops.linear_cross_entropy import linear_cross_entropy
from tests.helpers.cli import run_cli

MEBIBYTE = 2**20


def keep_mebibytes(count: int):
    """A forward pass that keeps this many mebibytes on its context, out of autograd's sight."""

    class Hiding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.hidden = torch.ones(count * MEBIBYTE // 4)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.ones(3, requires_grad=True)
    return lambda: Hiding.apply(x), x


def test_bytes_hidden_from_autograd_show_in_the_process() -> None:
    forward, _ = keep_mebibytes(64)
    assert saved_bytes(forward) == 0
    # The allocator rounds up, and other pages may be given back or touched meanwhile.
    assert resident_growth(keep_mebibytes, 64) == pytest.approx(64 * MEBIBYTE, abs=8 * MEBIBYTE)


def two_contestants(log: list[str], parity) -> Section:
    return Section(
        "work",
        "ms",
        [Contestant("slow", lambda: log.append("slow")), Contestant("fast", lambda: log.append("fast"), goal=1e9)],
        "slow",
        parity,
        scale=1e3,
    )


def test_nothing_is_measured_when_parity_fails() -> None:
    log: list[str] = []

    def parity() -> str:
        raise ParityError("they differ by 3")

    (result,) = run_sections([two_contestants(log, parity)], Options(rounds=2))
    assert log == []
    assert "rows" not in result
    assert "NOT MEASURED" in table(result)
    assert "they differ by 3" in table(result)


def test_rounds_are_interleaved_and_the_first_one_is_not_counted() -> None:
    log: list[str] = []
    rows = measure_section(two_contestants(log, lambda: "same"), Options(rounds=3))
    assert log == ["slow", "fast"] * 4
    assert [len(row.values) for row in rows] == [3, 3]


def test_ratios_are_of_the_same_round_and_the_table_names_missed_goals() -> None:
    section = Section(
        "work",
        "bytes",
        [Contestant("a", lambda: 10.0), Contestant("b", lambda: 4.0, 0.5), Contestant("c", lambda: 9.0, 0.5)],
        "a",
        lambda: "same",
        measure="value",
    )
    (result,) = run_sections([section], Options())
    assert [(row["ratio"], row["meets_goal"]) for row in result["rows"]] == [(1.0, None), (0.4, True), (0.9, False)]
    lines = table(result).splitlines()
    assert "falls short" in lines[-2]
    assert "falls short" not in lines[-3]


def test_ratios_to_further_baselines_are_of_the_same_rounds() -> None:
    values = iter([10.0, 4.0, 9.0])
    contestants = [Contestant(name, lambda: next(values)) for name in "abc"]
    further = {"b": {"c": 2.0, "a": 3.0, "left out": 1.0}}
    section = Section("work", "bytes", contestants, "a", lambda: "same", measure="value", further=further)
    (result,) = run_sections([section], Options())
    found = [(row["name"], row["baseline"], row["ratio"], row["meets_goal"]) for row in result["further"]]
    assert found == [("c", "b", 2.25, False), ("a", "b", 2.5, True)]
    assert "c to b: 2.250 (2.250 .. 2.250)  <= 2  falls short" in table(result)


def test_the_cpu_clock_does_not_count_waiting() -> None:
    def times(clock: str) -> float:
        section = Section("work", "s", [Contestant("sleep", lambda: time.sleep(0.2))], "sleep", lambda: "same")
        return measure_section(section, Options(rounds=1, clock=clock))[0].values[0]

    assert times("wall") >= 0.2
    assert times("cpu") < 0.1


def test_short_work_is_done_several_times_a_round_and_the_time_divided() -> None:
    log: list[str] = []

    def short() -> None:
        log.append("short")
        time.sleep(0.02)

    section = Section("work", "s", [Contestant("short", short)], "short", lambda: "same")
    (row,) = measure_section(section, Options(rounds=2, least_seconds=0.1))
    # Once to warm up, then a tenth of a second a round, which is five times unless sleeping takes longer than asked.
    assert 1 + 2 * 2 <= len(log) <= 1 + 2 * 5
    assert all(0.02 <= value < 0.1 for value in row.values)


def test_sections_are_chosen_by_their_titles() -> None:
    def sections():
        for title in ("batch 1", "batch 8"):
            yield Section(title, "s", [Contestant("a", lambda: 1.0)], "a", lambda: "same", measure="value")

    assert [result["title"] for result in run_sections(sections(), Options(sections=("8",)))] == ["batch 8"]
    assert len(list(run_sections(sections(), Options()))) == 2


def test_only_keeps_the_baseline() -> None:
    rows = measure_section(two_contestants([], lambda: "same"), Options(rounds=1, only=("fast",)))
    assert [row.name for row in rows] == ["slow", "fast"]
    rows = measure_section(two_contestants([], lambda: "same"), Options(rounds=1, only=("nothing",)))
    assert [row.name for row in rows] == ["slow"]


def test_parity_refuses_nan_and_too_large_a_difference() -> None:
    one = torch.zeros(3)
    assert assert_parity("x", one, one + 1e-7, 1e-6) == pytest.approx(1e-7)
    for other in (one + 1e-5, one + torch.nan):
        with pytest.raises(ParityError, match=r"^x: "):
            assert_parity("x", one, other, 1e-6)


def test_every_benchmark_is_found_and_described() -> None:
    found = discover()
    assert set(found) >= {"generate", "layer-scaling", "retina-attention", "train-memory", "train-speed"}
    assert all(module.HELP for module in found.values())


def test_the_benchmarks_are_the_checkout_s_whatever_else_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('somebody else')", encoding="utf-8")
    listed = run_cli("fairseq-ms", "bench", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}).stdout
    assert "layer-scaling" in listed


@pytest.mark.parametrize(
    "name",
    [
        "layer-scaling",
        "haed-parts",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("generate", "retina-attention", "train-memory", "compiled-layers")
        ),
    ],
)
def test_a_benchmark_runs_and_writes_its_numbers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    flags = ("--quick", "--rounds", "1", "--threads", "1", "--json", path)
    # The growth of the process is measured in a fresh one for every model.
    result = run_cli("fairseq-ms", "bench", name, *flags, timeout=1200.0)
    assert result.returncode == 0, result.stderr
    assert "parity" in result.stdout
    report = json.loads(path.read_text())
    assert report["machine"]["cores"] > 0
    assert all(row["values"] for part in report["results"] for row in part["rows"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["numbers.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such"], "NAME must be one of"),
        (["generate", "--rounds", "0"], "--rounds must be at least 1: got 0"),
        (["generate", "--threads", "0"], "--threads must be at least 1: got 0"),
        (
            ["generate", "--criterion", "linear_cross_entropy"],
            "--vocabulary and --criterion are for train-memory, train-speed and compiled-layers: got them with",
        ),
        (["generate", "--json", "no/such/folder/x.json"], "--json must name a file in a folder that exists"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


def test_without_a_checkout_it_says_so(tmp_path: Path) -> None:
    package = Path(__file__).parents[2] / "fairseq_ms"
    shutil.copytree(package, tmp_path / "fairseq_ms", ignore=shutil.ignore_patterns("__pycache__"))
    result = run_cli("fairseq-ms", "bench", "generate", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert result.returncode == 2
    assert "bench needs the folder benchmarks of a checkout" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_gradient_made_in_the_forward_pass_counts_as_kept_and_that_of_a_parameter_does_not() -> None:
    features, weight = torch.ones(6, 5, requires_grad=True), torch.ones(9, 5, requires_grad=True)
    target = torch.arange(6)
    loss = linear_cross_entropy(features * 2, weight, target, padding=1)
    kept = saved_bytes(lambda: linear_cross_entropy(features * 2, weight, target, padding=1)) + hidden_bytes(loss)
    logits = saved_bytes(lambda: F.cross_entropy(F.linear(features * 2, weight), target), nn.ParameterList([weight]))
    # Features or their gradient; and the logits' probabilities, the targets and their number.
    assert (kept, logits) == (6 * 5 * 4, (6 * 5 + 6 * 9 + 6 * 2 + 1) * 4)


def double_mebibytes(count: int):
    """A forward pass that needs this many mebibytes for a moment, and as many again in backward."""
    x = torch.ones(count * MEBIBYTE // 4, requires_grad=True)
    return lambda: (x * 2).sum(), x


def test_the_peak_of_a_process_is_what_was_there_at_once() -> None:
    # Twice the numbers is gone before their gradient is made; pages of libraries come on top.
    assert resident_peak(double_mebibytes, 64) == pytest.approx(64 * MEBIBYTE, abs=16 * MEBIBYTE)
