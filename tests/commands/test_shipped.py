"""The model that comes with the package: what takes it, and that it is what its card says."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fairseq_ms import cli
from fairseq_ms.export import exported
from tests.helpers.cli import ROOT
from tests.helpers.trained import NARROW, write_checkpoint

TEXT = "def read_text(path):\n    return path.read()\n\n\nclass Reader:\n    naïve = 3\n"
SIZES = [*NARROW, "--decoder-layers", "1", "--init-std", "0.4", "--positions", "rotary", "--tokens-per-sample", "20"]
REAL = exported.SHIPPED


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint over byte-level subwords, and its folder in half precision."""
    folder = tmp_path_factory.mktemp("shipped")
    for split in ("train", "valid", "test"):
        (folder / "texts" / split).mkdir(parents=True)
        (folder / "texts" / split / "a.txt").write_text(TEXT * 3)
    given = ["--bpe", "hf_byte_bpe", "--bpe-merges", "30", "--workers", "1", "--quiet"]
    assert cli.main(["prepare", "text", "--input", str(folder / "texts"), "--out", str(folder / "data"), *given]) == 0
    torch.manual_seed(1)
    model = write_checkpoint(folder / "model.pt", folder / "data" / "bin", "vanilla_lm", *SIZES)
    assert cli.main(["export", str(model), str(folder / "out"), "--fp16", "--no-python", "--license", "mit"]) == 0
    return folder


def test_half_a_model_without_python_is_half_as_large_and_has_none(place: Path) -> None:
    assert {file.name for file in (place / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "README.md"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert {tensor.dtype for tensor in load_file(place / "out" / "model.safetensors").values()} == {torch.float16}
    card = (place / "out" / "README.md").read_text()
    assert "fairseq-ms sample" in card
    assert "transformers import" not in card
    assert "auto_map" not in json.loads((place / "out" / "config.json").read_text())


def test_sample_without_a_checkpoint_takes_it_and_says_so_first(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exported, "SHIPPED", place / "out")
    written = []
    for checkpoint in ([], [str(place / "out")]):
        assert cli.main(["sample", *checkpoint, "--prompt", "def read_", "--max-len-b", "20", "--seed", "1"]) == 0
        written.append(capsys.readouterr())
    assert written[0].out == written[1].out
    assert written[0].out.startswith("def read_")
    assert written[0].err.startswith("no CHECKPOINT: using the model that comes with the package, described in ")
    assert str(place / "out") in written[0].err.splitlines()[0]
    assert written[1].err == ""


def test_perplexity_of_it_is_that_of_its_checkpoint(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But for the rounding of its weights."""
    monkeypatch.setattr(exported, "SHIPPED", place / "out")
    numbers = []
    for number, model in enumerate(
        (["--shipped", "--data", str(place / "texts/test/a.txt")], [str(place / "model.pt")])
    ):
        assert cli.main(["perplexity", *model, "--cpu", "--json", str(tmp_path / f"{number}.json")]) == 0
        numbers.append(json.loads((tmp_path / f"{number}.json").read_text()))
    assert numbers[0]["targets"] == numbers[1]["targets"]
    assert numbers[0]["window"] == numbers[1]["window"] == 20
    assert numbers[0]["bits_per_source_byte"] == pytest.approx(numbers[1]["bits_per_source_byte"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("sample --prompt a", "CHECKPOINT must be given"),
        ("perplexity --data texts/test/a.txt", "CHECKPOINT or --shipped must be given"),
        ("perplexity model.pt --shipped", "CHECKPOINT or --shipped must be given"),
        ("perplexity --shipped --data texts/test/a.txt", "CHECKPOINT must be given"),
        ("perplexity out", "--data must name a text"),
        ("perplexity out --data data/bin", "--data must name a text"),
    ],
)
def test_without_a_model_or_with_two_is_one_sentence(
    arguments: str, sentence: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(exported, "SHIPPED", place / "none")
    assert cli.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(f"fairseq-ms: {sentence}")


def test_a_long_file_is_completed_with_the_caches_size_beside_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "user_dir_examples" / "shipped" / "complete.py"
    (tmp_path / "long.py").write_text(TEXT * 30 + "    def last(self):\n        return 1\n")
    given = ["--file", str(tmp_path / "long.py"), "--model", str(place / "out"), "--tokens", "5"]
    monkeypatch.setattr(sys, "argv", [str(script), *given])
    runpy.run_path(str(script), run_name="__main__")
    first, _, _, row, *rest = capsys.readouterr().out.splitlines()
    tokens = re.match(r"long\.py: ([\d,]+) tokens; the model was trained on rows of 20", first)
    assert tokens is not None
    assert re.fullmatch(r" +512 +[\d,]+ +[\d.]+", row)
    assert rest[0].split()[0] == tokens[1]
    assert "        def last(self):" in rest


def test_its_files_are_those_of_its_record_and_its_bits_those_of_its_card(tmp_path: Path) -> None:
    if not REAL.is_dir():
        # Until one has been trained, no page tells of it.
        pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        assert not [page for page in pages if "shipped" in page.read_text(encoding="utf-8")]
        return
    record = json.loads((REAL / "record.json").read_text())
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in REAL.iterdir()}
    assert files.keys() - record["sha256"].keys() == {"README.md", "record.json"}
    assert {name: files[name] for name in record["sha256"]} == record["sha256"]
    assert sum(file.stat().st_size for file in REAL.iterdir()) <= 5_000_000
    # Where the recipe has changed, it has to be run again.
    recipe = ROOT / "user_dir_examples" / "shipped" / "make.py"
    text = ["--data", str(recipe), "--cpu", "--json", str(tmp_path / "found.json")]
    assert cli.main(["perplexity", "--shipped", *text]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["bits_per_source_byte"]
    assert found == pytest.approx(record["bits_per_byte_of_its_recipe"], rel=1e-3)
    # A model that has learnt nothing has four.
    assert found < 2.5
