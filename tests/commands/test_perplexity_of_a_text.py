"""`fairseq-ms perplexity` of a text counts what preparing it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_ms import cli
from tests.helpers import asked
from tests.helpers.trained import NARROW, write_checkpoint

TEXT = """He said: "it's done", didn't he?
The cats' tails (all 3 of them) cost $5.50 - naïve, isn't it?

    for x in y:
"""
SIZES = [*NARROW, "--decoder-layers", "1", "--init-std", "0.4", "--positions", "rotary"]
LEVELS = {
    "word": ["--level", "word"],
    "bpe": ["--bpe-merges", "30"],
    "bytes": ["--bpe", "hf_byte_bpe", "--bpe-merges", "30"],
}


def numbers_of(out: Path, *arguments: str) -> dict[str, Any]:
    assert cli.main(["perplexity", *arguments, "--cpu", "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("level", list(LEVELS))
def test_words_and_bytes_are_those_of_its_prepared_data(
    level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "a.txt").write_bytes(b"\xef\xbb\xbf" + 3 * TEXT.encode())
    given = ["--input", str(tmp_path / "texts"), "--out", str(tmp_path / "data"), "--workers", "1", "--quiet"]
    assert cli.main(["prepare", "text", *given, *LEVELS[level]]) == 0
    torch.manual_seed(1)
    checkpoint = str(write_checkpoint(tmp_path / "model.pt", tmp_path / "data" / "bin", "vanilla_lm", *SIZES))
    assert cli.main(["export", checkpoint, str(tmp_path / "out")]) == 0
    exported = [str(tmp_path / "out"), "--data"]
    prepared = numbers_of(tmp_path / "prepared.json", checkpoint)
    text = numbers_of(tmp_path / "text.json", *exported, str(tmp_path / "texts" / "test" / "a.txt"))
    for what in ("targets", "words_with_eol", "source_bytes"):
        assert prepared[what] == text[what], what
    for what in ("bits_per_target", "word_perplexity", "bits_per_source_byte"):
        assert prepared[what] == pytest.approx(text[what], rel=1e-5), what
    capsys.readouterr()
    for data in (b"", b" \n\n", b"\xef\xbb\xbf "):
        (tmp_path / "empty.txt").write_bytes(data)
        sentence = "--data must name a text with words"
        asked.assert_refused(["perplexity", *exported, str(tmp_path / "empty.txt")], sentence, capsys)
