"""`prepare text` reads the formats that data comes in, and says in one sentence what is wrong with a file."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from fairseq_ms_pipeline.files import read_json
from tests.preprocess import sample

ARTICLES = [f"Article {number}\n  über   alles 東京\n\nend" for number in range(60)]


def prepare(*flags: object) -> str:
    """What is said of the flags; nothing where all is well."""
    return sample.prepare("text", *flags, "--level", "word", check=False).stderr


def write(folder: Path, form: str, column: str = "text", articles: list = ARTICLES) -> Path:
    """One file or folder with the articles, in the form that its name tells."""
    rows = [{"id": number, column: article} for number, article in enumerate(articles)]
    path = folder / f"mine.{form}"
    if form == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))
    elif form in ("csv", "tsv"):
        with open(path, "w", newline="") as file:
            table = csv.DictWriter(file, rows[0], delimiter="," if form == "csv" else "\t")
            table.writeheader()
            table.writerows(rows)
    elif form == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=25)
    else:
        from datasets import Dataset

        Dataset.from_list(rows).save_to_disk(str(path), num_shards=2)
    return path


@pytest.mark.parametrize("form", ["json", "jsonl", "jsonl.gz", "csv", "tsv", "parquet", "saved"])
def test_every_row_of_every_format_is_a_document_with_its_own_lines(form: str, tmp_path: Path) -> None:
    source = write(tmp_path, form, "body")
    flags = ("--input", source, "--column", "body", "--tokenise", "none", "--blank-lines", "keep")
    assert prepare(*flags, "--valid-fraction", "0.2", "--test-fraction", "0.2", "--out", tmp_path / "out") == ""
    splits = read_json(tmp_path / "out" / "manifest.json")["splits"]
    assert sum(counts["documents"] for counts in splits.values()) == len(ARTICLES)
    lines = [
        line for split in splits for line in (tmp_path / "out" / "text" / f"{split}.txt").read_text().split("\n")[:-1]
    ]
    assert sorted(lines) == sorted(" ".join(line.split()) for article in ARTICLES for line in article.split("\n"))


def test_the_splits_of_a_saved_data_set_are_kept_and_its_caches_are_none_of_it(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    parts = {"train": ARTICLES[:40], "validation": ARTICLES[40:50], "test": ARTICLES[50:]}
    rows = {split: Dataset.from_dict({"text": articles}) for split, articles in parts.items()}
    DatasetDict(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "train" / "cache-1.arrow").write_bytes(b"what `map` has kept")
    assert prepare("--input", tmp_path / "saved", "--out", tmp_path / "out") == ""
    splits = read_json(tmp_path / "out" / "manifest.json")["splits"]
    assert {split: counts["documents"] for split, counts in splits.items()} == {"train": 40, "valid": 10, "test": 10}


def shorten(path: Path, count: int = 20) -> None:
    path.write_bytes(path.read_bytes()[:-count])


@pytest.mark.parametrize(
    ("form", "spoil", "said"),
    [
        ("jsonl.gz", shorten, "mine.jsonl.gz is damaged"),
        ("parquet", shorten, "mine.parquet is damaged"),
        ("parquet", lambda path: path.write_bytes(b"PAR1"), "mine.parquet is damaged"),
        ("csv", lambda path: path.write_text('text\n"never ends\n'), "mine.csv is no table"),
        ("saved", lambda path: shorten(next(path.glob("data-00001*")), 900), "data-00001-of-00002.arrow is damaged"),
        ("saved", lambda path: [file.unlink() for file in path.glob("data-*")], "mine.saved holds no file"),
    ],
)
def test_a_broken_file_is_one_sentence(form, spoil, said, tmp_path: Path) -> None:
    source = write(tmp_path, form)
    spoil(source)
    printed = prepare("--input", source, "--out", tmp_path / "out")
    assert said in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "parquet", "saved"])
def test_without_the_column_or_text_in_it_the_sentence_says_what_there_is(form, tmp_path) -> None:
    source = write(tmp_path, form, "body")
    flags = ("--input", source, "--out", tmp_path / "out")
    assert "has no field text: its fields are id, body; --column names one." in prepare(*flags)
    if form != "csv":  # in which a number is text
        assert f"--input {source} has no text." in prepare(*flags, "--column", "id")
    empty = write(tmp_path, form, "body", ["", "\n \n"])
    assert "has no text." in prepare("--input", empty, "--out", tmp_path / "out", "--column", "body")
    assert not (tmp_path / "out").exists()


def test_a_column_has_no_meaning_for_plain_text(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("words\n")
    said = prepare("--input", tmp_path / "mine.txt", "--out", tmp_path / "out", "--column", "body")
    assert "--column body has no meaning where --input has no JSON or table" in said


def test_files_of_other_endings_are_read_when_they_are_named_and_counted_when_they_are_not(tmp_path: Path) -> None:
    texts, flags = tmp_path / "texts", ("--tokenise", "none", "--documents", "line", "--out")
    texts.mkdir()
    for name in ("a.md", "b.md", "c.py", "dataset_info.json"):
        (texts / name).write_text("".join(f"line {number} of {name}\n" for number in range(200)))
    alone = prepare("--input", texts, *flags, tmp_path / "none")
    assert "it has 2 .md, 1 .py; --suffix" in alone
    with_md = prepare("--input", texts, "--suffix", ".md", *flags, tmp_path / "md")
    assert with_md.startswith("Not read: 1 .py; --suffix")
    assert with_md.count("\n") == 1
    assert prepare("--input", texts, "--suffix", ".py", ".md", *flags, tmp_path / "both") == ""
    counts = {name: read_json(tmp_path / name / "manifest.json")["splits"] for name in ("md", "both")}
    assert [sum(c["lines"] for c in splits.values()) for splits in counts.values()] == [400, 600]
    assert "--suffix" in prepare("--input", texts, "--suffix", "md", *flags, tmp_path / "wrong")
    assert "--bpe hf_byte_bpe" in prepare("--input", texts, "--suffix", ".py", "--out", tmp_path / "code")


def test_a_language_without_spaces_and_two_files_get_advice(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "abc":
        text = "".join(chr(0x4E00 + place % 700) for place in range(3000))
        (texts / name).with_suffix(".txt").write_text(text.replace("\u4e0c", "\n"))
    flags = ("text", "--input", texts, "--bpe-merges", "20", "--out")
    said = sample.prepare(*flags, tmp_path / "characters", check=False).stderr
    assert "--language zh" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "characters").exists(), "which would refuse the other flag"
    assert sample.prepare(*flags, tmp_path / "words", "--language", "zh").stderr == ""
    (texts / "c.txt").unlink()
    said = prepare("--input", texts, "--out", tmp_path / "two")
    assert "no text for the split valid or test" in said
    assert "--documents lines:1" in said
