"""Associative recall: rows are as the task says, every model runs, and caches are as large as points say."""

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.associative import QUICK, Size, accuracy, batch, main, page, points
from benchmarks.windows import recorded
from tests.helpers.cli import ROOT


def test_every_key_comes_again_once_with_its_value_as_the_target() -> None:
    size = Size()
    tokens, targets = batch(size, 5, np.random.default_rng(1))
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(row[: 2 * size.pairs : 2], row[1 : 2 * size.pairs : 2]))
        assert len(pairs) == len(set(pairs.values())) == size.pairs
        assert max(pairs) < size.symbols // 2 <= min(pairs.values())
        asked = [place for place, target in enumerate(wanted) if target >= 0]
        assert min(asked) >= 2 * size.pairs
        assert sorted(row[place] for place in asked) == sorted(pairs)
        assert all(wanted[place] == pairs[row[place]] for place in asked)


def test_the_most_probable_symbol_counts_where_a_key_comes_again() -> None:
    class Oracle(torch.nn.Module):
        """Looks the pairs up."""

        def new_state(self, rows: int) -> None:
            return None

        def forward(self, tokens: torch.Tensor, state: None) -> tuple[torch.Tensor, None]:
            logits = torch.zeros(*tokens.shape, QUICK.symbols)
            for row, own in enumerate(tokens.tolist()):
                pairs = dict(zip(own[: 2 * QUICK.pairs : 2], own[1 : 2 * QUICK.pairs : 2]))
                for place, token in enumerate(own):
                    logits[row, place, pairs.get(token, 0)] = 1.0
            return logits, None

    assert accuracy(Oracle(), QUICK, 1) == 1.0  # type: ignore[arg-type]


def test_points_are_of_three_caches_and_run(tmp_path: Path) -> None:
    whole = points(Size())
    assert [point.keys for point in whole if point.model == "full"] == [64]
    for model in ("window", "two widths", "key/value heads", "Transformer-QL"):
        assert [point.keys for point in whole if point.model == model] == [8, 16, 32]
    command = ["--out", str(tmp_path / "out"), "--quick", "--report", str(tmp_path / "page.md")]
    assert main([*command, "--minutes", "-1"]) == 3
    assert main(command) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert len(lines) == 1 + len({point.key(1) for point in points(QUICK)})
    text = (tmp_path / "page.md").read_text()
    for point in points(QUICK):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {point.model} |")]
        assert f"{point.keys:g}" in row.split("|")[2].replace(",", "").split()
    assert (tmp_path / "page.png").stat().st_size > 5_000
    assert main(command) == 0


def test_the_page_has_what_its_records_say() -> None:
    papers = ROOT / "docs" / "papers"
    machine, records = recorded(papers / "recall_by_cache")
    table = [line for line in page(records, machine, "").splitlines() if line.startswith("|")]
    assert len(table) == 2 + len({key.split(" | ")[0] for key in records})
    assert "\n".join(table) in (papers / "claims.md").read_text(encoding="utf-8")
    assert list(machine["size"]) == list(Size())
