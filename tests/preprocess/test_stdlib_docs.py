"""The demo corpus: the standard library's own documentation, read from source files."""

import pytest

from fairseq_ms_pipeline.files import read_json
from fairseq_ms_pipeline.prose import sentences
from fairseq_ms_pipeline.stdlib_docs import corpus, docstrings, library_folder, paragraphs, split_by_module
from tests.helpers.cli import ROOT, run_cli


def test_the_corpus_is_half_a_megabyte_in_three_splits_and_the_screen_shows_its_counts(tmp_path):
    script = ROOT / "preprocess" / "stdlib_docs" / "prepare.py"
    done = run_cli("python", script, "--out", tmp_path, "--workers", "2", "--bpe-merges", "600")
    splits = read_json(tmp_path / "manifest.json")["splits"]
    sizes = {split: counts["bytes"] for split, counts in splits.items()}
    assert 400_000 < sum(sizes.values()) < 1_500_000
    assert 0.03 < sizes["valid"] / sum(sizes.values()) < 0.06
    assert 0.03 < sizes["test"] / sum(sizes.values()) < 0.06
    assert splits["train"]["unknown"] == 0
    assert "words_with_eol" in done.stdout
    assert "learn BPE" in done.stderr
    assert "Warning" not in done.stderr
    assert "tensorboardX" not in done.stderr


@pytest.mark.parametrize("parts", [paragraphs, sentences])
def test_no_long_part_of_valid_or_test_stands_in_another_split(parts):
    texts = corpus(library_folder(), parts)
    splits = split_by_module(texts, seed=1, fraction=0.05)
    owner: dict[str, str] = {}
    for name, lines in texts.items():
        for line in (line for line in lines if len(line.split()) > 7):
            assert owner.setdefault(line, splits[name]) == splits[name], line


def test_docstrings_are_read_without_running_the_module():
    source = (
        b'"""Top."""\nraise SystemExit("ran")\nclass A:\n    """Of A."""\n    async def f(self):\n        "Of f."\n'
    )
    assert list(docstrings(source)) == ["Top.", "Of A.", "Of f."]
