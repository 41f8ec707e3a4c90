"""The tables of `fairseq-ms bench`: each is built and run at tiny shapes on a CPU, and known by its name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import generate, growth, retina, train_mem
from benchmarks.peers import TINY, VANILLA
from benchmarks.report import page
from benchmarks.table import TIME, NotInstalledError, Options
from benchmarks.tables import tables
from fairseq_ms.cli import main
from fairseq_ms.presets.registry import PRESETS
from tests.helpers.cli import run_cli
from tests.models.test_transfo_xl_parity import peer as the_peer

OPTIONS = Options(quick=True, rounds=1, least_seconds=0.0)
# A fixture: the folder of the package that has TransfoXL.
peer = the_peer
TABLES = tables(OPTIONS)
# All rows of these take longer than a test may.
LONG = {"training", "growth", "growth-generation", "wikitext-103", "generate", "transformer-ql", "train-mem", "recipes"}


def test_a_step_of_matrices_alone_reads_every_matrix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = generate.sampled_model(VANILLA, TINY)
    every = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed." not in name]
    read: list[int] = []
    monkeypatch.setattr(generate.F, "linear", lambda x, weight: read.append(weight.data_ptr()))
    generate.read_matrices(model, rows=2, count=3)
    assert sorted(read) == sorted(p.data_ptr() for p in every for _ in range(3))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in TABLES])
def test_every_row_can_be_measured(name: str) -> None:
    table = TABLES[name]
    if table.parity is not None:
        assert table.parity()
    for row in table.rows:
        try:
            work = row.build()
            if work.before is not None:
                work.before()
            work.run()
            assert set(work.others()) <= set(table.columns) - {TIME}, row.settings
        except NotInstalledError:
            continue


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_of_its_row_sees_what_windows_see() -> None:
    # It has no gradients on a CPU.
    inputs = retina.Inputs(640)
    inputs.scales = [tuple(x.detach() for x in own) for own in inputs.scales]
    assert retina.FLEX in {row.settings[0] for row in tables(replace(OPTIONS, device="cuda"))["retina"].rows}
    for found, expected in zip(inputs.forward(retina.FLEX)(), inputs.forward(retina.WINDOWS)(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=retina.TOLERANCE)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_what_a_row_is_divided_by_is_a_row_of_its_cohort(device: str, quick: bool) -> None:
    for table in tables(replace(OPTIONS, device=device, quick=quick)).values():
        cohorts = {row.settings: row.cohort for row in table.rows}
        for row in table.rows:
            for base in table.ratios.values():
                assert base(row.settings) not in cohorts or cohorts[base(row.settings)] == row.cohort, row.settings
        for heading, base in table.ratios.items():
            assert any(base(row.settings) in cohorts for row in table.rows), (table.name, heading)


@pytest.mark.slow
def test_peers_are_measured_where_they_are_installed(peer: Path, tmp_path: Path) -> None:
    flags = ("--quick", "--rounds", "1", "--report", tmp_path / "page.md", "--only", "TransfoXL", "--only", "GPT-2")
    run_cli("fairseq-ms", "bench", "all", *flags, env={"PYTHONPATH": str(peer)}, timeout=1200.0)
    lines = (tmp_path / "page.md").read_text().splitlines()
    lines = [line for line in lines if line.startswith(("| TransfoXL", "| Hugging Face"))]
    measured = [" ".join(row.settings) for table in TABLES.values() for row in table.rows]
    assert len(lines) == sum("TransfoXL" in row or "GPT-2" in row for row in measured)
    assert not [line for line in lines if "not " in line or "failed" in line]


def test_every_preset_of_tables_2_to_4_has_the_papers_number() -> None:
    assert set(train_mem.presets()) == set(train_mem.PAPER)
    (table,) = train_mem.tables(Options())
    assert [row.settings[0] for row in table.rows] == [*train_mem.presets(), *train_mem.PEERS]
    assert all(PRESETS[name].table in ("Table 2", "Table 3", "Table 4") for name in train_mem.PAPER)


@pytest.mark.parametrize(("name", "device"), [("results_gpu", "cuda"), ("results_cpu", "cpu")])
def test_a_page_in_docs_is_what_its_records_say(name: str, device: str) -> None:
    docs = Path(__file__).parents[2] / "docs" / "papers"
    first, *lines = map(json.loads, (docs / f"{name}.jsonl").read_text().splitlines())
    found = tables(Options(device=device))
    rows = {table.key(row) for table in found.values() for row in table.rows}
    assert {line["key"] for line in lines} <= rows | set(found)
    written = page(list(found.values()), {line["key"]: line for line in lines}, first["machine"])
    assert (docs / f"{name}.md").read_text() == written


def test_a_model_with_a_memory_reads_texts_of_any_length_in_the_same_segments() -> None:
    for name in growth.STREAMS:
        model = growth._model(name, replace(growth.TINY, length=2048))
        assert (model.decoder.core.segment_len, model.decoder.core.mem_len) == (512, 512)


def test_the_benchmarks_are_the_checkout_s_whatever_else_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('somebody else')", encoding="utf-8")
    listed = run_cli("fairseq-ms", "bench", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}).stdout
    assert "Training by length" in listed


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA device not to be there")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such"], "NAME must be all or one of"),
        (["generate", "--json", "no/such/folder/x.json"], "--json must lie in a folder that exists"),
        (["generate", "--report", "no/folder/x.md"], "--report must lie in a folder that exists"),
        (["generate", "--only", "nothing"], "--only must be part of a row's name"),
        (["generate", "--device", "cuda"], "--device cuda needs a GPU: torch"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    said = capfd.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


def test_without_a_checkout_it_says_so(tmp_path: Path) -> None:
    package = Path(__file__).parents[2] / "fairseq_ms"
    shutil.copytree(package, tmp_path / "fairseq_ms", ignore=shutil.ignore_patterns("__pycache__"))
    result = run_cli("fairseq-ms", "bench", "generate", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert result.returncode == 2
    assert "bench needs the folder benchmarks of a checkout" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_tests_take_the_device_that_they_are_given(pytestconfig: pytest.Config) -> None:
    assert torch.ones(1).device.type == pytestconfig.getoption("device")
    assert torch.nn.Linear(1, 1).weight.device.type == pytestconfig.getoption("device")
