"""The driver of the windows' table: arms as their names say, losses told apart by hand, runs that are stopped."""

import itertools
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import windows
from benchmarks.windows import (
    ARMS,
    RATES,
    SIZES,
    Arm,
    Corpus,
    Job,
    build,
    distances_back,
    evaluate,
    jobs,
    keys_a_head,
    main,
    narrowed,
    page,
    parse,
    recorded,
)
from tests.preprocess import sample

QUICK = SIZES["quick"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    source = sample.write_sample(folder / "text.txt", lines=900)
    sample.prepare("text", "--input", source, "--documents", "lines:20", "--bpe-merges", "60", "--out", folder / "text")
    return folder / "text"


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_is_causal_uses_all_its_parts_and_has_the_cache_that_it_says(arm: Arm) -> None:
    model = build(arm, QUICK, 50, seed=1).eval()
    for parameter in model.parameters():
        # Also what begins at zero.
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(50, (1, 256), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 160] = (changed[0, 160] + 1) % 50
    before, after = (model.logits(model.features(text)) for text in (tokens, changed))
    assert torch.equal(before[:, :160], after[:, :160])
    assert not torch.equal(before[:, 160:], after[:, 160:])
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    number = re.search(r"window (\d+)", arm.name)
    keys = 1024 if arm.windows == "1x=0:" else int(number[1]) if number else 128
    share = arm.share(8)
    assert keys_a_head(parse(arm.windows, 8), 1024) * share == pytest.approx(keys * share, rel=0.015)
    # Small heads stay small in longer texts.
    assert keys_a_head(parse(arm.windows, 8, 4), 4096) == pytest.approx(4 * keys, rel=0.04)


def test_windows_of_the_first_steps_are_those_of_the_same_parameters() -> None:
    (arm,) = (arm for arm in ARMS if arm.early)
    model = build(arm, QUICK, 50, seed=1).eval()
    early = narrowed(model, arm, QUICK, 50).eval()
    tokens = torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 50
    for own, far in ((early, False), (model, True)):
        before, after = (own.logits(own.features(text)) for text in (tokens, changed))
        # Four layers of windows of 8 reach back 28 tokens.
        assert torch.equal(before[:, 29:], after[:, 29:]) is not far
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.logits(model.features(tokens))
    early.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    assert not torch.equal(model.logits(model.features(tokens)), before)


@pytest.mark.parametrize(
    ("losses", "searched", "best"),
    [
        ({0.01: 3.0, 0.02: 2.0, 0.04: 2.5}, [0.02, 0.04, 0.01], 0.02),
        ({0.02: 2.0, 0.04: 1.5, 0.08: 1.6}, [0.02, 0.04, 0.08], 0.04),
        ({0.02: 2.0, 0.04: 1.5, 0.08: 1.4}, [0.02, 0.04, 0.08], 0.08),
        ({0.01: 1.0, 0.02: 2.0, 0.04: 2.5}, [0.02, 0.04, 0.01], 0.01),
        ({0.02: 2.0, 0.04: 1.5}, [0.02, 0.04, 0.08], 0.04),  # the loss of 0.08 is not finite
    ],
)
def test_rates_are_searched_until_the_best_is_not_the_last(losses: dict, searched: list, best: float) -> None:
    arm, lines = Arm("full", "1x=0:", seeds=2), dict[str, dict]()
    records: Any = SimpleNamespace(by_key=lambda: lines)
    asked = []
    for job in jobs([arm], "text", records, None):
        asked.append(job)
        lines[job.key] = {"numbers": {"all": losses[job.rate]}} if job.rate in losses else {"failed": "not finite"}
    assert [job.rate for job in asked if job.tuning] == searched
    assert set(searched) <= set(RATES)
    assert asked[len(searched) :] == [Job("text", arm, seed, best, False) for seed in (1, 2)]
    assert asked[-1].key == f"text | full | seed 2 rate {best}"


@pytest.mark.parametrize("text", ["1x=0", "1x=0:8*2,,1x=0:*6", "1x=0:8*9", "4x=0:8", "1x=8:8", "1x=0:8+"])
def test_windows_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse(text, 8)


def test_losses_are_told_apart_by_how_far_back_the_same_pair_stood(prepared: Path) -> None:
    row = [1, 2, 1, 2, 3, 1, 2]
    naive = []
    for t, pair in enumerate(itertools.pairwise(row)):
        same = [s for s in range(t) if (row[s], row[s + 1]) == pair]
        naive.append(t - same[-1] if same else 0)
    assert distances_back(row) == naive == [0, 0, 2, 0, 0, 3]
    corpus = Corpus(prepared)
    found = evaluate(build(ARMS[0], QUICK, corpus.symbols, 1), corpus, QUICK, torch.device("cpu"))
    assert sum(found["share"].values()) == pytest.approx(1.0, abs=1e-3)
    mean = sum(found["share"][name] * loss for name, loss in found["distance"].items())
    assert mean == pytest.approx(found["all"], rel=1e-3)


def test_a_run_that_is_stopped_goes_on_as_if_nothing_had_happened(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(name: str) -> dict[str, dict]:
        found = (tmp_path / name / "records.jsonl").read_text().splitlines()[1:]
        return {line["key"]: line["numbers"] for line in map(json.loads, found)}

    # A name that is no name of a file.
    command = [str(prepared), "--size", "quick", "--only", "full", "one key/value head"]
    assert main([*command, "--out", str(tmp_path / "whole"), "--seeds", "1"]) == 0
    # A clock on which every look takes a second, so that the time is over after a few updates.
    clock = {"monotonic": partial(next, itertools.count()), "process_time": float}
    monkeypatch.setattr(windows, "time", SimpleNamespace(**clock))
    codes: list[int] = []
    while not codes or (codes[-1] == 3 and len(codes) < 60):
        codes.append(main([*command, "--out", str(tmp_path / "sliced"), "--seeds", "1", "--minutes", "0.15"]))
    assert codes[-1] == 0
    assert len(codes) > 4
    assert lines("sliced") == lines("whole")
    assert len(lines("whole")) == 2 * 4
    assert not list(tmp_path.glob("*/*.pt"))


def test_the_page_says_what_has_run_and_what_has_not(prepared: Path, tmp_path: Path) -> None:
    out, report, png = tmp_path / "out", tmp_path / "page.md", tmp_path / "page.png"
    command = [str(prepared), "--out", str(out), "--size", "quick", "--only", "full", "six small heads"]
    older = Path(__file__).parents[2] / "docs" / "papers" / "windows"
    assert main([*command, "--report", str(report), "--also", str(older)]) == 0
    text = report.read_text()
    lines = map(json.loads, (out / "records.jsonl").read_text().splitlines()[1:])
    losses = {line["key"]: line["numbers"]["all"] for line in lines}
    assert len(losses) == 2 * (3 + 2)
    for arm in ("full", "six small heads"):
        (rate,) = {key.rpartition(" ")[2] for key in losses if f"{arm} | seed" in key}
        seeds = ", ".join(f"{losses[f'text | {arm} | seed {seed} rate {rate}']:.3f}" for seed in (1, 2))
        tenth = f"{min(loss for key, loss in losses.items() if f'{arm} | rate' in key):.3f}"
        assert re.search(rf"(?m)^\| {arm} \| .*\| {tenth} \| {seeds} \| [^|]+ \| {rate} ", text)
    own, _, other = text.partition("## Code, 5 million tokens")
    assert "window 128" in own.partition("Not run")[2]
    assert "tokens and blocks" in other.partition("Of older code")[2].partition("\n\n")[0]
    assert "Not run" not in other
    assert png.stat().st_size > 10_000


def test_the_page_in_docs_is_that_of_its_records() -> None:
    papers = Path(__file__).parents[2] / "docs" / "papers"
    tables = [recorded(papers / name) for name in ("windows_longer", "windows_controls", "windows")]
    assert (papers / "windows.md").read_text() == page(tables, "windows.png")


def test_records_of_several_machines_are_in_one_table() -> None:
    papers = Path(__file__).parents[2] / "docs" / "papers"
    machine, records = recorded(papers / "windows_longer")
    half = len(records) // 2
    parts = [dict([*records.items()][:half]), dict([*records.items()][half:])]
    text = page([(machine, parts[0]), ({**machine, "device": "Another"}, parts[1])], "windows.png")
    whole = page([(machine, records)], "windows.png")
    assert text == whole.replace(f"hours on {machine['device']}", f"hours on {machine['device']} and Another")


def test_a_folder_that_prepare_has_not_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", str(tmp_path / "out"), "--size", "quick"])
    assert "CORPUS must" in capsys.readouterr().err
