"""The pipeline's stages one by one: splits, documents, words, the sample for BPE, shards."""

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_ms_pipeline import bpe
from fairseq_ms_pipeline.datasets import text as text_dataset
from fairseq_ms_pipeline.documents import Draw, Reader, document_starts
from fairseq_ms_pipeline.files import once_a_file
from fairseq_ms_pipeline.text import byte_symbols, readable_words, undone
from tests.preprocess.sample import DATASET


def test_misread_words_are_split_so_that_nothing_is_lost_but_a_space():
    draw = random.Random(1)
    pieces = ["@@", "@", "<s>", "</s>", "<unk>", "<pad>", "a", "<", ">", "/s"]
    for _ in range(2000):
        line = " ".join("".join(draw.choices(pieces, k=draw.randint(1, 4))) for _ in range(3))
        words = readable_words(line)
        assert "".join(words) == line.replace(" ", "")
        for word in words:
            assert not word.endswith("@@")
            assert word == "<unk>" or not word.endswith(("<s>", "</s>", "<pad>", "<unk>"))
    assert readable_words("plain <unk> @-@ words") == ["plain", "<unk>", "@-@", "words"]


def test_bytes_that_are_no_text_and_symbols_that_are_no_bytes_are_spelled_out() -> None:
    for text in ("plain", "ä € 𝄞", "<unk> and </s>"):
        assert undone(byte_symbols(text), "byte") == text
    assert undone("a <0xE2> <0x82>", "byte") == "a�"
    assert undone("<0x80> b", "byte") == "�b"
    assert undone("a <unk> madeupword0001", "byte") == "a<unk>madeupword0001"


def test_a_random_split_is_of_the_asked_size_and_the_same_for_the_same_seed():
    drawn = [Draw(DATASET, seed).split_of("x") for seed in range(1, 2001)]
    assert abs(drawn.count("valid") / 2000 - 0.2) < 0.03
    assert abs(drawn.count("test") / 2000 - 0.2) < 0.03
    first, second = Draw(DATASET, 5), Draw(DATASET, 5)
    assert [first.split_of("x") for _ in range(50)] == [second.split_of("x") for _ in range(50)]


@pytest.mark.parametrize(("count", "valid", "test"), [(100, 0.4, 0.4), (1000, 0.103, 0.101), (3, 0.01, 0.01)])
def test_files_are_shared_out_in_the_fractions_of_all_at_least_one_a_split(count, valid, test) -> None:
    names = [f"{number}.txt" for number in range(count)]
    for seed in range(5):
        draw = Draw(replace(DATASET, documents="file", valid_fraction=valid, test_fraction=test), seed)
        draw.share_out(names)
        drawn = [draw.split_of(name) for name in names]
        wanted = [max(1, round(count * fraction)) for fraction in (valid, test)]
        assert [drawn.count("valid"), drawn.count("test")] == wanted


def test_what_a_seed_draws_for_files_stays_as_it_is() -> None:
    """Corpora that were prepared before are to be made again as they were."""
    draw = Draw(replace(DATASET, valid_fraction=0.05, test_fraction=0.05), 1)
    names = [f"{number}.txt" for number in range(40)]
    draw.share_out(names)
    drawn = {name: draw.split_of(name) for name in names}
    assert {name: split for name, split in drawn.items() if split != "train"} == {
        "13.txt": "valid",
        "14.txt": "valid",
        "17.txt": "test",
        "35.txt": "test",
    }


@pytest.mark.parametrize("kept", ["keep", "drop"])
def test_a_document_begins_with_its_first_line_that_is_kept(kept: str, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("\n\nfirst\n\nsecond\n", encoding="utf-8")
    lines = list(Reader(replace(DATASET, documents="file", blank_lines=kept), [tmp_path], 1).lines())
    assert [line.starts_document for line in lines].count(True) == 3
    first = [line.text for line in lines if line.starts_document]
    assert first == ([""] if kept == "keep" else ["first"]) * 3


def test_the_innermost_folder_named_after_a_split_decides() -> None:
    reader = Reader(replace(DATASET, split_names=text_dataset.given_names(text_dataset.DATASET)), [], 1)
    for name, split in (
        ("n/train/a.txt", "train"),
        ("n/train/en/a.txt", "train"),
        ("n/test/fiction/en/a.txt", "test"),
        ("train/valid/en/a.txt", "valid"),
        ("test/train/en/a.tokens", "train"),
        ("train/en/test.txt", "test"),
        ("n/en/a.txt", None),
        ("training/a.txt", None),
    ):
        assert reader.given_split(name) == split, name
    named = Reader(replace(DATASET, split_names={"train": ("books-2/train.txt",)}), [], 1)
    assert named.given_split("books-2/train.txt") == "train"
    assert named.given_split("books-2/raw/train.txt") is None


@pytest.mark.parametrize(
    ("documents", "starts"),
    [
        ("file", [0]),
        ("line", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("lines:3", [0, 3, 6]),
        ("blank", [0, 3, 5, 7]),
        ("wikitext", [0, 5]),
    ],
)
def test_documents_start_where_the_declaration_says(documents, starts):
    lines = [" ", " = First = ", " ", " Text . ", " ", " = Second = ", " ", " = = Part = = "]
    assert [n for n, (start, _) in enumerate(document_starts(lines, documents)) if start] == starts


def test_bpe_of_a_text_in_which_nothing_occurs_twice_is_refused_and_not_written(tmp_path):
    with pytest.raises(ValueError, match="BPE cannot be learnt"):
        bpe.learn([Counter({"ab": 1, "cd": 1})], 10, 4, tmp_path / "codes.bpe")
    assert not (tmp_path / "codes.bpe").exists()


def test_the_bpe_sample_is_bounded_and_spread_over_the_corpus(tmp_path):
    shards = []
    for index in range(40):
        shards.append(tmp_path / f"{index:02d}")
        shards[-1].write_text("x" * 100)
    chosen = bpe.sample(shards, limit_bytes=1000)
    assert sum(shard.stat().st_size for shard in chosen) <= 1000
    assert [shard.name for shard in chosen] == [f"{n:02d}" for n in range(0, 40, 4)]
    assert bpe.sample(shards, limit_bytes=4000) == shards


def test_a_file_is_read_again_once_it_has_changed(tmp_path):
    read: list[str] = []

    def load(path: Path) -> int:
        read.append(path.read_text())
        return len(read)

    path, kept = tmp_path / "codes", once_a_file(load)
    path.write_text("old")
    assert [kept(path), kept(path)] == [1, 1]
    path.write_text("new")
    os.utime(path, ns=(1, 1))
    assert kept(path) == 2
    assert read == ["old", "new"]


def test_hidden_folders_are_no_part_of_an_input_so_that_it_may_hold_the_folder_that_is_made(tmp_path: Path) -> None:
    for name in ("train/a.txt", ".git/b.txt", "train/.ipynb_checkpoints/c.txt", "out/.work/plan.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"words of {name}\n")
    for names in ({}, text_dataset.given_names(text_dataset.DATASET)):
        lines = Reader(replace(text_dataset.DATASET, split_names=names), [tmp_path], 1).lines()
        assert [line.text for line in lines] == ["words of train/a.txt"]


def test_each_input_has_to_hold_some_text(tmp_path: Path) -> None:
    text, bare = tmp_path / "more.txt", tmp_path / "bare.json"
    text.write_text("words\n")
    bare.write_text('[{"text": null}, "no article", {"text": ""}]')
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "page.html").write_text("markup\n")
    for other, sentence in ((tmp_path / "pages", "holds no file of Text"), (bare, "has no text")):
        with pytest.raises(ValueError, match=rf"^--input {other} {sentence}"):
            list(Reader(text_dataset.DATASET, [text, other], 1).lines())
