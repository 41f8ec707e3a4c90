"""The driver of the runs behind docs/claims.md: what it trains parses, what it measures comes out, the page has it."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT, run_cli
from tests.install.test_examples import parse, recorded

CLAIMS = ROOT / "user_dir_examples" / "claims"
RESULTS = ROOT / "docs" / "claims.jsonl"
sys.path.insert(0, str(CLAIMS))
import corpora  # noqa: E402
import driver  # noqa: E402
from claims import CLAIMS as PAPERS  # noqa: E402
from claims import Claim, verdict  # noqa: E402
from runs import PARTS, RUNS, Run  # noqa: E402

# Parsing hydra's configurations takes seconds each.
HYDRA = ("hred", "encoder64", "iem", "finetune")
PARSED = [run for run in RUNS if run.part != "hierarchical" or run.name in HYDRA]
# Of each part that fairseq-train trains, the first; a run differs from the others of its part in a few flags.
FIRST = list({run.part: run for run in reversed(RUNS) if run.part != "hierarchical"}.values())


@pytest.mark.parametrize(
    "run",
    [run if run in FIRST else pytest.param(run, marks=pytest.mark.slow) for run in PARSED],
    ids=lambda run: run.full_name,
)
def test_every_training_parses(run: Run, tmp_path: Path) -> None:
    started = driver.Driver(tmp_path, tmp_path, None)
    program, *arguments = started.training(driver.Job(run, 1), 1000)
    if program.endswith(".sh"):
        for command in recorded(Path(program), arguments, tmp_path):
            parse(command)
    else:
        parse([program, *arguments])


@pytest.mark.parametrize(("name", "warmup"), [("haed", 19), ("iem", 126), ("finetune", 126)])
def test_phases_warm_up_for_a_third_of_their_updates(name: str, warmup: int, tmp_path: Path) -> None:
    (run,) = [run for run in RUNS if (run.part, run.name) == ("hierarchical", name)]
    command = driver.Driver(tmp_path, tmp_path, None).training(driver.Job(run, 1), 380)
    warmups = [word for word in command if "warmup_updates" in word]
    assert len(warmups) == (2 if name == "iem" else 3)
    assert all(word.endswith(f"={warmup}") for word in warmups)


def test_names_are_unique_and_later_phases_have_earlier_ones() -> None:
    names = [(run.part, run.name) for run in RUNS]
    assert len(set(names)) == len(names)
    for run in RUNS:
        assert run.part in PARTS
        assert run.after is None or (run.part, run.after) in names


@pytest.mark.parametrize("claim", [claim for claims in PAPERS.values() for claim in claims], ids=lambda c: c.words[:40])
def test_every_claim_compares_runs_that_the_driver_has(claim: Claim) -> None:
    for name, measure in ((claim.one, claim.measure), (claim.other, claim.other_measure or claim.measure)):
        (run,) = [run for run in RUNS if run.full_name == name]
        assert measure in [column for column, _ in run.columns] + ["last valid"]
    assert (claim.one, claim.measure) != (claim.other, claim.other_measure)


@pytest.mark.parametrize(
    ("one", "relation", "other", "expected"),
    [
        ([7.0], "<", [7.1], "confirmed"),
        ([7.1], "<", [7.0], "reversed"),
        ([7.1], ">", [7.0], "confirmed"),
        ([7.1], "<=", [7.0], "reversed"),
        ([7.0], "<=", [7.1], "confirmed"),
        # Nearer than the margin.
        ([7.0], "<", [7.01], "no difference"),
        ([7.0], "<=", [6.99], "confirmed"),
        ([7.0], "=", [7.01], "confirmed"),
        ([7.0], "=", [7.1], "not confirmed"),
        # The means differ by more than the margin, the seeds overlap.
        ([7.0, 7.2], "<", [7.1, 7.3], "no difference"),
        ([7.0, 7.05], "<", [7.1, 7.3], "confirmed"),
        ([], "<", [7.1], "not run"),
        ([7.0], "=", [], "not run"),
    ],
)
def test_a_verdict_needs_more_than_the_margin_and_seeds_that_do_not_overlap(
    one: list[float], relation: str, other: list[float], expected: str
) -> None:
    assert verdict(one, relation, other) == expected


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short documents a split, of words that repeat."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(60)]
    for split, paragraphs in (("train", 500), ("valid", 210), ("test", 210)):
        (folder / split).mkdir()
        for name in ("a", "b"):
            lines = (" ".join(rng.choices(words, k=20)) for _ in range(paragraphs))
            (folder / split / f"{name}.txt").write_text("\n\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_runs_are_trained_tested_and_written_once(text: Path, tmp_path: Path) -> None:
    wanted = [
        "streaming/ql/1",
        "plenty/ql_no_droppath",
        "multiscale/topdown_even",
        "hierarchical/iem",
        "hierarchical/finetune",
    ]
    command: list[str | Path] = ["python", CLAIMS / "driver.py", text, "--out", tmp_path / "out"]
    command += ["--max-updates", "2", "--only", *wanted]
    run_cli(*command, timeout=900)
    results = tmp_path / "out" / "results.jsonl"
    written = results.read_text()
    records = {record["job"]: record for record in map(json.loads, written.splitlines())}
    assert set(records) == {f"{name.removesuffix('/1')}/1" for name in wanted}
    ql, plenty, topdown, iem, finetune = records.values()
    assert set(ql["tests"]) == {"window 16", "window 32"}
    assert all(1 < value < 1000 for value in ql["tests"].values())
    assert set(plenty["tests"]) == set(ql["tests"])
    assert topdown["kept_bytes_per_target"] > 1000
    assert iem["tests"] == {}
    assert 0 < finetune["tests"]["test"] < 10
    # The second phase begins when the first has ended.
    assert finetune["hours"][0] > iem["hours"][-1]
    assert str(tmp_path) not in written
    assert str(ROOT) not in written
    # A further call has nothing to do.
    assert run_cli(*command).stdout == ""
    assert results.read_text() == written
    tables = run_cli("python", CLAIMS / "tables.py", results, "--figures", tmp_path).stdout
    parts = list(dict.fromkeys(name.split("/")[0] for name in wanted))
    headings = [line.split(": ") for line in tables.splitlines() if ": " in line and not line.startswith("|")]
    assert [name for name, what in headings if what == "claims"] == list(PAPERS)
    assert [name for name, what in headings if what != "claims"] == parts
    assert "| first phase, then end to end |" in tables
    assert len(list(tmp_path.glob("claims_*.png"))) == len(parts)


@pytest.mark.slow
def test_another_librarys_model_is_trained_on_the_rows_of_the_recipes_and_written_once(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    data = corpora.prepare("some_subwords", text, out)
    command: list[str | Path] = ["python", CLAIMS / "others.py", out, "--only", "fairseq"]
    run_cli(*command, timeout=300)
    (record,) = map(json.loads, (out / "others.jsonl").read_text().splitlines())
    assert record["updates"] == corpora.targets(data) // (4 * 512)
    # Six layers, symbols, and 512 positions behind those of padding.
    symbols = len((data / "dict.txt").read_text().splitlines()) + 4
    assert record["parameters"] == 6 * 198_272 + 2 * 128 + (symbols + 514) * 128
    assert 1 < record["valid_perplexity"] < symbols
    assert "update 0" not in run_cli(*command).stdout


def test_a_failing_training_is_one_sentence_that_names_its_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "data" / "subwords").mkdir(parents=True)
    manifest = {"splits": {"train": {"targets": 5000}}}
    (out / "data" / "subwords" / "manifest.json").write_text(json.dumps(manifest))  # without the data themselves
    done = run_cli(
        *("python", CLAIMS / "driver.py", tmp_path, "--out", out, "--only", "multiscale/vanilla4"), check=False
    )
    assert done.returncode == 1
    log = out.resolve() / "multiscale" / "vanilla4.1" / "train.log"
    assert done.stderr == f"claims: fairseq-train ended with exit code 1, see {log}\n"
    assert log.is_file()
    assert not (out / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ("streaming/no_such", "--only must name runs that --list prints: got streaming/no_such"),
        ("streaming/xl", "TEXT must have train/, valid/ and test/ with *.txt files"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(run: str, sentence: str, tmp_path: Path) -> None:
    done = run_cli(*("python", CLAIMS / "driver.py", tmp_path, "--out", tmp_path / "out", "--only", run), check=False)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_has_the_tables_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, str(CLAIMS / "tables.py"), str(RESULTS)], capture_output=True, text=True, check=True
    )
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    tables = [block for block in done.stdout.split("\n\n") if block.lstrip().startswith("|")]
    assert tables
    for table in tables:
        assert table.strip() in page
