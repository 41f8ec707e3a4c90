"""Splits by bytes, at the ends: of one's own text without names or flags."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from fairseq_ms import cli
from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.documents import Ends, Reader

DATASET = Dataset("text", "Text", documents="ends")
SMALL = ["--bpe", "hf_byte_bpe", "--bpe-merges", "20", "--workers", "1", "--quiet"]


def novel(seed: int, paragraphs: int, blank: bool = True) -> str:
    """Paragraphs of a few lines, with empty ones between them, or of one line."""
    draw = random.Random(seed)
    lines = [[f"{seed} {number} " + "x" * draw.randint(20, 60)] * draw.randint(1, 5) for number in range(paragraphs)]
    return ("\n\n" if blank else "\n").join("\n".join(group) if blank else " ".join(group) for group in lines) + "\n"


def splits_of(path: Path, dataset: Dataset = DATASET) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {split: [] for split in SPLITS}
    for split, _, text in Reader(dataset, [path], 1).lines():
        found[split].append(text)
    return found


@pytest.mark.parametrize("blank", [True, False])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [True, False])
def test_one_text_gives_its_ends_cut_at_paragraphs(blank: bool, ending: str, packed: bool, tmp_path: Path) -> None:
    text = novel(1, 400, blank).replace("\n", ending)
    file = tmp_path / ("a.txt.gz" if packed else "a.txt")
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found = splits_of(file)
    parts = ["".join(line + "\n" for line in found[split]) for split in SPLITS]
    assert "".join(parts) == text
    for part in parts[1:]:
        assert len(part) / len(text) == pytest.approx(0.05, abs=0.006)
    assert not blank or all(part.endswith(f"\n{ending}") for part in parts[:2])


def test_paragraphs_that_are_too_long_are_cut_at_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Title\n\n" + "A line of verse.\n" * 2000)
    found = splits_of(tmp_path)
    assert [len(found[split]) for split in SPLITS] == pytest.approx([1801, 100, 100], abs=12)


def test_every_long_text_gives_its_end_and_short_ones_are_whole(tmp_path: Path) -> None:
    sizes = {"long": 300, "other": 200} | {f"short {number}": 20 for number in range(20)}
    for seed, (name, size) in enumerate(sizes.items()):
        (tmp_path / f"{name}.txt").write_text(novel(seed, size))
    found = splits_of(tmp_path)
    whole = sum(file.stat().st_size for file in tmp_path.iterdir())
    held_out: Counter[str] = Counter()
    for split in ("valid", "test"):
        assert sum(len(line) + 1 for line in found[split]) / whole == pytest.approx(0.05, abs=0.015)
        held_out.update({line.split()[0] for line in found[split] if line})
    assert held_out["0"] == held_out["1"] == 2, "of each long text a part in both"
    assert {count for name, count in held_out.items() if int(name) > 1} == {1}, "a short one lies in one"
    for seed, size in enumerate(sizes.values()):
        if seed > 1 and held_out[str(seed)]:
            lines = [line for split in ("valid", "test") for line in found[split] if line.startswith(f"{seed} ")]
            assert len(lines) == sum(bool(line) for line in novel(seed, size).split("\n"))


@pytest.mark.parametrize("fractions", [(0.05, 0.05), (0.01, 0.02), (0.3, 0.1)])
def test_fractions_are_of_bytes_whatever_the_sizes(fractions: tuple[float, float]) -> None:
    valid, test = fractions
    draw = random.Random(3)
    for _ in range(60):
        sizes = [round(draw.lognormvariate(9, 2)) + 9000 for _ in range(draw.choice((1, 2, 3, 8, 11, 30, 300)))]
        dataset = Dataset("text", "Text", documents="ends", valid_fraction=valid, test_fraction=test)
        lines = [-(-size // 20) for size in sizes]
        ends, found = Ends(dataset, 1, sizes, lines), dict.fromkeys(SPLITS, 0)
        for size in sizes:
            for line in range(0, size, 20):
                width = min(20, size - line)
                found[ends.split_of_line("", line == 0, "x" * (width - 1))] += width
        for split, fraction in zip(("valid", "test"), fractions):
            assert 0.4 * fraction < found[split] / sum(sizes) < 2.1 * fraction, (sizes, found)


@pytest.mark.parametrize("count", [3, 5])
def test_a_few_texts_of_one_line_are_whole_and_every_split_has_one(count: int, tmp_path: Path) -> None:
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text(f"{number}" + "x" * (400 + number))
    assert sorted(map(len, splits_of(tmp_path).values())) == [1, 1, count - 2]


def prepared(*flags: object) -> int:
    return cli.main(["prepare", "text", *map(str, flags), *SMALL])


def test_a_folder_that_was_prepared_or_begun_before_keeps_its_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    for seed in range(4):
        (tmp_path / "texts" / f"{seed}.txt").write_text(novel(seed, 60))
    command = ("--input", tmp_path / "texts", "--out", tmp_path / "out")
    assert prepared(*command, "--documents", "file") == 0
    before = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {split: counts["documents"] for split, counts in before["splits"].items()} == {
        "train": 2,
        "valid": 1,
        "test": 1,
    }
    assert prepared(*command) == 0
    assert "is prepared already" in capsys.readouterr().out
    # As a run leaves it that was killed before it wrote anything else.
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out" / ".work").mkdir(parents=True)
    (tmp_path / "out" / ".work" / "plan.json").write_text(json.dumps({"settings": before["settings"]}))
    assert prepared(*command) == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"] == before["splits"]
    assert prepared("--input", tmp_path / "texts", "--out", tmp_path / "new") == 0
    new = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert new["settings"]["documents"] == "ends"
    assert {split: counts["documents"] for split, counts in new["splits"].items()} == dict.fromkeys(SPLITS, 4)
    assert prepared(*command, "--documents", "ends") == 2
    assert "documents is 'file' there and 'ends' now" in capsys.readouterr().err


def test_a_folder_of_another_rule_is_not_taken_for_one_of_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(novel(1, 400))
    command = ("--input", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert prepared(*command, "--documents", "lines:10") == 0
    assert prepared(*command) == 2
    assert "documents is 'lines:10' there and 'ends' now" in capsys.readouterr().err


def test_it_prints_bytes_and_tokens_of_each_split_and_the_next_command_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(novel(1, 400))
    assert prepared("--input", tmp_path / "a.txt", "--out", tmp_path / "my data") == 0
    first = capsys.readouterr().out
    counts = json.loads((tmp_path / "my data" / "manifest.json").read_text())["splits"]
    for split in SPLITS:
        row = next(line.split() for line in first.splitlines() if line.split()[:1] == [split])
        share = counts[split]["source_bytes"] / sum(counts[name]["source_bytes"] for name in SPLITS)
        assert row[1:4] == [f"{counts[split]['source_bytes']:,}", f"({share:.1%})", f"{counts[split]['targets']:,}"]
    updates = max(100, 4 * counts["train"]["targets"] // 4096)
    data = f"'{tmp_path / 'my data' / 'bin'}'"
    last = f"next: fairseq-ms train retina_lm_long_2048 --data {data} --max-update {updates}"
    assert first.splitlines()[-1] == last
    assert prepared("--input", tmp_path / "a.txt", "--out", tmp_path / "my data") == 0
    assert capsys.readouterr().out.splitlines()[-1] == last
