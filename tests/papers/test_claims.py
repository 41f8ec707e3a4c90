"""The runs behind docs/papers/claims.md: what is trained parses, what is measured comes out, the page has it."""

import json
import math
import os
import random
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.cli import ROOT, run_cli
from tests.install.test_examples import parse, recorded

CLAIMS_FOLDER = ROOT / "user_dir_examples" / "claims"
RESULTS = [ROOT / "docs" / "papers" / name for name in ("claims.jsonl", "recipes.jsonl")]
PAGE = ROOT / "docs" / "papers" / "results_claims.md"
FIGURE = ROOT / "docs" / "papers" / "figures" / "claims.png"
# Texts of the papers, where they are at hand.
TEXTS = os.environ.get("FAIRSEQ_MS_PAPERS")
sys.path.insert(0, str(CLAIMS_FOLDER))
import corpora  # noqa: E402
import driver  # noqa: E402
import tables  # noqa: E402
from claims import CLAIMS, PAPERS, Effect, effect, verdict  # noqa: E402
from runs import PARTS, RUNS, Run  # noqa: E402

# Parsing hydra's configurations takes seconds each.
HYDRA = ("hred", "haed_rotary", "encoder64", "iem", "finetune")
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


def test_names_are_unique_and_later_phases_have_earlier_ones() -> None:
    names = [(run.part, run.name) for run in RUNS]
    assert len(set(names)) == len(names)
    for run in RUNS:
        assert run.part in PARTS
        assert run.after is None or (run.part, run.after) in names


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["about"])
def test_a_claim_has_its_papers_words_and_numbers_and_tests_that_can_be_made(claim: dict) -> None:
    assert claim["paper"] in PAPERS
    assert claim.get("claimed", "less") in ("less", "more", "level", "at most")
    numbers = claim.get("numbers", [])
    assert ("effect" in claim) == bool(numbers)
    if numbers:
        one, other = (float(number["value"]) for number in numbers)
        expected = one - other if claim["paper"] == "haed" else math.log2(one / other)
        if claim.get("unit") == "per cent":
            expected = 100 * (one / other - 1)
        assert claim["effect"] == pytest.approx(expected, abs=0.051 if claim.get("unit") == "per cent" else 0.00051)
    for number in numbers:
        assert number["value"] in number["row"].split()
    if TEXTS:
        (path,) = Path(TEXTS).glob(f"{claim['paper']}*.txt")
        written = " ".join(path.read_text(encoding="utf-8").split())
        for words in (*claim["sentence"].split(" … "), *(number["row"] for number in numbers)):
            assert words in written
    for test in claim["tests"]:
        if "page" in test:
            # Thousands of bytes are kB.
            page = (ROOT / "docs" / test["page"]).read_text(encoding="utf-8")
            for value in (*test["one"], *test["other"]):
                assert f"{value:g}" in page or f"{round(value * 1000):,}" in page
        elif "one" in test:
            measures = (test.get("measure", "test"), test.get("other_measure", test.get("measure", "test")))
            for name, measure in zip((test["one"], test["other"]), measures):
                (run,) = [run for run in RUNS if run.full_name == name]
                assert measure in [*run.columns, "last valid"]
        else:
            assert test["void"]


@pytest.mark.parametrize(
    ("low", "high", "pairs", "claimed", "paper", "expected"),
    [
        (-0.3, -0.1, 3, "less", -0.2, "confirmed"),
        (-0.3, -0.1, 3, "less", -0.4, "confirmed, but smaller"),
        (-0.3, -0.1, 3, "more", 0.2, "reversed"),
        (0.1, 0.3, 3, "more", None, "confirmed"),
        (0.1, 0.3, 3, "level", None, "reversed"),
        (-0.03, 0.01, 3, "less", -0.2, "no difference larger than 0.030 bits"),
        (-3.0, 1.0, None, "less", -20.0, "no difference larger than 3.0%"),
        (-0.3, 0.1, 3, "less", -0.2, "inconclusive: the interval holds 0 and the paper's effect"),
        # Less than twice the paper's effect, which the paper's own is, or than none.
        (0.1, 0.3, 3, "at most", 0.2, "confirmed"),
        (0.5, 0.6, 3, "at most", 0.2, "reversed"),
        (-0.2, -0.1, 3, "at most", 0.2, "no loss, where the paper has one"),
        (0.1, 0.5, 3, "at most", 0.2, "inconclusive: the interval holds twice the paper's effect"),
        (-0.3, -0.1, 3, "at most", None, "confirmed"),
        (0.1, 0.3, 3, "at most", None, "reversed"),
        # One pair says no more than where it points.
        (-0.3, -0.1, 1, "less", -0.2, "inconclusive: one pair, points the same way"),
        (0.1, 0.3, 1, "less", -0.2, "inconclusive: one pair, points the other way"),
        (-0.1, 0.1, 1, "less", -0.2, "inconclusive: one pair, within the spread of seeds"),
        (-math.inf, math.inf, 1, "less", -0.2, "inconclusive: one pair, spread of seeds unknown"),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side(
    low: float, high: float, pairs: int | None, claimed: str, paper: float | None, expected: str
) -> None:
    assert verdict(Effect((low + high) / 2, low, high, pairs), claimed, paper) == expected


def test_a_test_that_is_not_the_papers_or_was_not_run_says_so() -> None:
    assert verdict(Effect(-0.2, -0.3, -0.1, 3), "less", -0.2, "another depth") == "not tested: another depth"
    assert verdict(None, "less", -0.2) == "not tested: not run"


def test_effects_are_paired_by_seed_with_students_interval() -> None:
    def record(run: str, seed: int, bits: float) -> dict:
        return {"job": f"p/{run}/{seed}", "tests": {"test": 2**bits}, "valid_bits": [bits]}

    test = {"one": "p/a", "other": "p/b"}
    records = [record("a", seed, bits) for seed, bits in ((1, 7.0), (2, 7.5), (3, 8.0))]
    records += [record("b", seed, bits) for seed, bits in ((1, 7.1), (3, 8.3), (4, 1.0))]
    found = effect(records, test)
    assert found is not None
    # Differences of -0.1 and -0.3: half of the interval is t(1) = 12.706 times 0.1.
    assert (found.mean, found.pairs) == (pytest.approx(-0.2), 2)
    assert found.resolution == pytest.approx(1.2706)
    # One pair: three seeds of `a` have a deviation of 0.5, t(2) = 4.303. Seeds of another part do not count.
    apart = [{**record("c", seed, bits), "job": f"q/c/{seed}"} for seed, bits in ((1, 1.0), (2, 9.0))]
    found = effect([*records[:4], *apart], test)
    assert found is not None
    assert found.pairs == 1
    assert found.resolution == pytest.approx(4.303 * 0.5 * math.sqrt(2))
    assert effect(records[:3], test) is None
    # Of times, the quickest round of one against the slowest of the other.
    found = effect([], {"page": "", "one": [9.0, 10.0, 12.0], "other": [18.0, 20.0, 25.0]})
    assert found is not None
    assert (found.mean, found.low, found.high) == (pytest.approx(-50), pytest.approx(-64), pytest.approx(-100 / 3))


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
        "multiscale_fast/topdown_even",
        "hierarchical/iem",
        "hierarchical/finetune",
    ]
    command: list[str | Path] = ["python", CLAIMS_FOLDER / "driver.py", text, "--out", tmp_path / "out"]
    command += ["--max-updates", "2", "--only", *wanted]
    run_cli(*command, timeout=900)
    results = tmp_path / "out" / "results.jsonl"
    written = results.read_text()
    records = {record["job"]: record for record in map(json.loads, written.splitlines())}
    assert set(records) == {f"{name.removesuffix('/1')}/1" for name in wanted}
    ql, plenty, topdown, iem, finetune = (records[f"{name.removesuffix('/1')}/1"] for name in wanted)
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
    printed = run_cli("python", CLAIMS_FOLDER / "tables.py", results, "--figure", tmp_path / "claims.png").stdout
    headings = [line for line in printed.splitlines() if line and not line.startswith("|")]
    parts = [part for part in PARTS if any(name.startswith(f"{part}/") for name in wanted)]
    expected = [f"claims of {paper}" for paper in PAPERS.values()] + [f"runs of {part}" for part in parts]
    assert headings == [*expected, "not run"]
    assert "| first phase, then end to end |" in printed
    assert (tmp_path / "claims.png").stat().st_size > 1000


@pytest.mark.slow
def test_another_librarys_model_is_trained_on_the_rows_of_the_recipes_and_written_once(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    data = corpora.prepare("some_subwords", text, out)
    command: list[str | Path] = ["python", CLAIMS_FOLDER / "others.py", out, "--only", "fairseq"]
    run_cli(*command, timeout=300)
    (record,) = map(json.loads, (out / "others.jsonl").read_text().splitlines())
    assert record["updates"] == corpora.targets(data) // (4 * 512)
    # Six layers, symbols, and 512 positions after those of padding.
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
        *("python", CLAIMS_FOLDER / "driver.py", tmp_path, "--out", out, "--only", "multiscale_long/vanilla6"),
        check=False,
    )
    assert done.returncode == 1
    log = out.resolve() / "multiscale_long" / "vanilla6.1" / "train.log"
    assert done.stderr == f"claims: fairseq-train ended with exit code 1, see {log}\n"
    assert log.is_file()
    assert not (out / "results.jsonl").exists()


@pytest.mark.parametrize(("run", "name"), [("streaming/no_such", "--only"), ("streaming/xl", "TEXT")])
def test_wrong_input_is_refused_in_one_sentence(run: str, name: str, tmp_path: Path) -> None:
    command = ("python", CLAIMS_FOLDER / "driver.py", tmp_path, "--out", tmp_path / "out", "--only", run)
    done = run_cli(*command, check=False)
    assert done.returncode != 0
    assert f"{name} must " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_has_the_tables_of_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = tables.tables(tables.read(RESULTS))
    assert tables.filled("<!-- table: a -->\n\n| old |\nb\n", {"a": "| new |"}) == "<!-- table: a -->\n\n| new |\nb\n"
    shown = {found[1] for found in tables.BLOCK.findall(page)}
    assert shown == set(named) - {"runs of recipes_2048"}  # each of which the claims of its paper have
    assert tables.filled(page, named) == page


def test_the_figure_shows_the_results() -> None:
    with Image.open(FIGURE) as image:
        drawn = json.loads(image.text[tables.ROWS])  # type: ignore[attr-defined]
    expected = tables.plotted(tables.read(RESULTS))
    assert [row["label"] for row in drawn] == [row["label"] for row in expected]
    for row, from_results in zip(drawn, expected):
        # Logarithms may differ in their last bits where the figure was drawn.
        assert row == pytest.approx(from_results, abs=2e-6)
