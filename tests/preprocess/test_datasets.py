"""Each data set's script on small files in the exact layout of the archive that people download."""

import gzip
import importlib.util
import io
import itertools
import json
import os
import random
import re
import struct
import sys
import warnings
import zipfile
from pathlib import Path

import pytest

from fairseq_ms import cli
from fairseq_ms_pipeline.files import read_json
from fairseq_ms_pipeline.sources import plain_files, text_files
from tests.preprocess.sample import archived, prepare

WORDS = ["the", "of", "river", "unnatural", "kings", "walked", "dance", "dancing", "town", "towns", "<unk>", "@-@"]


def counts_of(out: Path) -> dict[str, dict]:
    """The manifest's counts of each split."""
    return read_json(out / "manifest.json")["splits"]


def text_of(out: Path, split: str) -> str:
    return (out / "text" / f"{split}.txt").read_text()


def sentences(count: int, seed: int, words=WORDS) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(3, 9))) + " ." for _ in range(count)]


def wiki(articles: int, seed: int) -> str:
    """Text as in WikiText: a space at both ends of a line, lines of a single space, headings between equal signs."""
    lines = []
    for index in range(articles):
        lines += ["", f"= Article {index} =", "", *sentences(3, seed + index), "", "= = Part = =", ""]
        lines += sentences(2, seed + index + 100)
    return "".join(f" {line} \n" if line else " \n" for line in [*lines, ""])


def words_with_eol(text: str) -> int:
    return len(text.split()) + text.count("\n")


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wikitext")
    texts = {"train": wiki(30, 1), "valid": wiki(4, 1000), "test": wiki(5, 2000)}
    files = {f"wikitext-103/wiki.{split}.tokens": text for split, text in texts.items()}
    return archived(folder / "wikitext-103-v1.zip", {"wikitext-103/": "", **files}), texts


@pytest.mark.parametrize("level", ["bpe", "word"])
def test_wikitext103_keeps_the_split_and_counts_every_line_end(wikitext, tmp_path, level):
    archive, texts = wikitext
    flags = ["--bpe-merges", "20"] if level == "bpe" else []
    done = prepare("wikitext103", "--input", archive, "--out", tmp_path / "out", "--level", level, *flags)
    for split, text in texts.items():
        counts = counts_of(tmp_path / "out")[split]
        assert counts["words_with_eol"] == words_with_eol(text)
        assert counts["documents"] == text.count("= Article ")
        assert counts["source_bytes"] == len(text.encode())
        assert (counts["targets"] == counts["words_with_eol"]) == (level == "word")
        assert counts["unknown"] == text.split().count("<unk>")
        tokenised = "".join(" ".join(line.split()) + "\n" for line in text.split("\n")[:-1])
        assert text_of(tmp_path / "out", split) == tokenised
    if level == "word":
        types = read_json(tmp_path / "out" / "manifest.json")["vocabulary"]["types"]
        assert types == len(set(texts["train"].split())) + 1
    # Far from the real one, and said so.
    assert "WARNING: train has" in done.stdout
    assert "103,227,021" in done.stdout


@pytest.mark.parametrize("size", ["2", "92"])
def test_simplebooks_takes_the_folder_of_the_asked_size_and_not_its_raw_twin(size, tmp_path):
    files = {}
    for index, (other, split) in enumerate(itertools.product(("2", "92"), ("train", "valid", "test"))):
        text = "".join(line + "\n" for line in ["CHAPTER I", "", *sentences(20 + 9 * index, index)])
        files[f"simplebooks/simplebooks-{other}/{split}.txt"] = text
        files[f"simplebooks/simplebooks-{other}-raw/{split}.txt"] = "Raw text.\n" * 500
        files[f"__MACOSX/simplebooks/simplebooks-{other}/._{split}.txt"] = "\x00\x05\x16\x07"
    archive = archived(tmp_path / "simplebooks.zip", {"simplebooks/README.md": "# SimpleBooks\n", **files})
    done = prepare("simplebooks", "--input", archive, "--out", tmp_path / "out", "--size", size)
    assert f"SimpleBooks-{size} in" in done.stdout
    for split, counts in counts_of(tmp_path / "out").items():
        text = files[f"simplebooks/simplebooks-{size}/{split}.txt"]
        assert text_of(tmp_path / "out", split) == text
        assert counts["targets"] == words_with_eol(text)


def test_bookcorpus_reads_both_parts_of_the_tar_and_splits_runs_of_sentences(tmp_path):
    parts = {f"books_large_p{n}.txt": "".join(s + "\n" for s in sentences(40_000, n)) for n in (1, 2)}
    archive, out = archived(tmp_path / "bookcorpus.tar.bz2", parts), tmp_path / "out"
    prepare("bookcorpus", "--input", archive, "--out", out, "--bpe-merges", "60", "--shard-mb", "0.5")
    splits = counts_of(out)
    assert sum(counts["documents"] for counts in splits.values()) == 40
    assert all(counts["lines"] % 2000 == 0 for counts in splits.values())
    joined = [line for split in splits for line in text_of(out, split).splitlines()]
    assert sorted(joined) == sorted("".join(parts.values()).splitlines())


def test_bookcorpus_as_one_file_a_book_is_tokenised_and_keeps_books_together(tmp_path):
    text = "A book begins.\n\n" + 'She said, "no"; he didn\'t.\n' * 3
    books = {f"books1/epubtxt/{index:02d}-a-title.epub.txt": text for index in range(10)}
    archive, out = archived(tmp_path / "books1.tar.gz", books), tmp_path / "out"
    prepare("bookcorpus", "--input", archive, "--out", out, "--layout", "books", "--bpe-merges", "20")
    splits = counts_of(out)
    assert {split: counts["documents"] for split, counts in splits.items()} == {"train": 8, "valid": 1, "test": 1}
    assert all(counts["lines"] == 4 * counts["documents"] for counts in splits.values())
    assert 'She said , " no " ; he didn \'t .' in text_of(out, "train")


def test_cc_news_reads_articles_of_json_jsonl_and_text(tmp_path):
    source = tmp_path / "cc_download_articles"
    titles = [f"Headline {index}" for index in range(92)]
    for index, title in enumerate(titles[:60]):
        folder = source / f"www.example{index % 5}.com"
        folder.mkdir(parents=True, exist_ok=True)
        article = {"title": title, "maintext": "First paragraph .\n\nSecond one .", "language": "en", "url": "u"}
        (folder / f"{index}.json").write_text(json.dumps(article, indent=1))
    with gzip.open(source / "more.jsonl.gz", "wt") as file:
        for title in titles[60:90]:
            file.write(json.dumps({"title": title, "text": "Body .", "maintext": None}) + "\n")
    (source / "plain.txt").write_text("Headline 90\nBody .\n\nHeadline 91\nBody .\n")
    out = tmp_path / "out"
    prepare("cc_news", "--input", source, "--out", out, "--bpe-merges", "30", "--seed", "3")
    splits = counts_of(out)
    assert sum(counts["documents"] for counts in splits.values()) == len(titles)
    joined = "".join(text_of(out, split) for split in splits)
    assert sorted(line for line in joined.splitlines() if line.startswith("Headline")) == sorted(titles)
    assert sum(counts["lines"] for counts in splits.values()) == 60 * 3 + 30 * 2 + 2 * 2


def test_your_own_text_is_split_by_the_names_train_valid_and_test_when_they_are_there(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / "mine" / split).mkdir(parents=True)
        (tmp_path / "mine" / split / "a.txt").write_text(f"of {split}\n" * 4)
    prepare("text", "--input", tmp_path / "mine", "--out", tmp_path / "out", "--level", "word")
    for split in ("train", "valid", "test"):
        assert text_of(tmp_path / "out", split) == f"of {split}\n" * 4
    flags = ("--input", tmp_path / "mine" / "train", "--out", tmp_path / "x", "--split", "given")
    said = prepare("text", *flags, check=False).stderr
    assert "--split given: --input has no file or folder named valid or test" in said


def test_linked_folders_are_read_and_a_loop_of_links_ends(tmp_path):
    for split in ("real", "mine/valid", "mine/test"):
        (tmp_path / split).mkdir(parents=True)
        (tmp_path / split / "a.txt").write_text(f"of {split}\n")
    (tmp_path / "mine" / "train").symlink_to(Path("..", "real"))
    (tmp_path / "real" / "back").symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / ".hidden").symlink_to(tmp_path)
    # A folder that lies in the input itself keeps its name.
    (tmp_path / "mine" / "a").symlink_to("test")
    assert [str(file.relative_to(tmp_path)) for file in plain_files(tmp_path / "mine")] == [
        f"mine/{split}/a.txt" for split in ("test", "train", "valid")
    ]
    prepare("text", "--input", tmp_path / "mine", "--out", tmp_path / "out", "--level", "word")
    assert text_of(tmp_path / "out", "train") == "of real\n"


@pytest.mark.parametrize("flags", [["--documents", "file"], ["--documents", "lines:1", "--test-fraction", "0.5"]])
@pytest.mark.parametrize("name", ["", os.fsdecode(b"\xfe.txt")])
def test_names_that_are_not_utf_8_are_read(tmp_path, flags, name):
    (tmp_path / "in").mkdir()
    for number in range(3):
        file = os.fsdecode(b"\xff\xfe%d.txt" % number)
        (tmp_path / "in" / file).write_text("".join(f"{number} {line}\n" for line in range(200)))
    source = tmp_path / "in"
    if name:
        source = source.rename(tmp_path / name)
    if flags[1] != "file":
        source = next(source.iterdir())
    command = ("text", "--input", source, "--out", tmp_path / "out", "--level", "word", *flags)
    prepare(*command)
    assert read_json(tmp_path / "out" / "manifest.json")["settings"]["inputs"][0]["name"] == source.name
    assert "is prepared already" in prepare(*command).stdout


def changed_zip(flags: int = 0, method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of a text with other flags, or another method, than it was written with."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text\n")
    whole = bytearray(file.getvalue())
    for start, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = whole.index(start) + at
        whole[place : place + 4] = struct.pack("<HH", flags, method)
    return bytes(whole)


def test_files_of_one_name_in_an_archive_are_each_read_once(tmp_path):
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in ("first\n", "second\n"):
            archive.writestr("a.txt", text)
    found = [file.stream.read() for file in text_files([tmp_path / "twice.zip"], lambda name: name == "a.txt")]
    assert found == [b"first\n", b"second\n"]


@pytest.mark.parametrize(
    ("dataset", "name", "content", "sentence"),
    [
        ("wikitext103", "", b"", "--input is missing"),
        ("simplebooks", "empty", b"", "is an empty folder"),
        ("bookcorpus", "more.txt", b"text\n", "no file of Toronto BookCorpus (books_large_p1.txt, books_large_p2.txt)"),
        ("wikitext103", "notes.md", b"text\n", "holds no file of WikiText-103"),
        ("wikitext103", "cut.zip", lambda whole: whole[:900] + whole[1400:], "is damaged or incomplete"),
        ("cc_news", "bad.json", b'{"title": "a",\n maintext: 1}', "bad.json, line 2: not JSON"),
        ("cc_news", "a.json", b'[{"headline": 1}]', "a.json has no field title or maintext or text or plain_text: its"),
        ("cc_news", "none.jsonl", b"[]\n", "it has no articles"),
        ("cc_news", "deep.json", b"[" * 100_000, "deep.json, line 1: not JSON (it is nested too deeply)"),
        ("text", "deep.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "deep.jsonl, line 2: not JSON (it is nested"),
        ("text", "secret.zip", changed_zip(flags=1), "secret.zip cannot be read (a.txt is encrypted, or"),
        ("text", "method.zip", changed_zip(method=97), "method.zip cannot be read (a.txt is encrypted, or"),
        ("text", "half.jsonl", b'{"text": "a \\ud83d b"}\n', "half.jsonl has an article with '\\ud83d'"),
        ("text", "blank.txt", b" \n\n", "blank.txt has no text"),
        ("text", "latin.txt", b"one line\ntwo\nthe caf\xe9\n", "line 3, byte offset 20: byte 0xe9 is not UTF-8"),
        ("text", "marked.txt", b"\xef\xbb\xbfab\xff", "line 1, byte offset 5: byte 0xff is not UTF-8"),
        ("text", "cut.txt.gz", gzip.compress(b"words and words\n" * 1000, mtime=0)[:-20], "is damaged or incomplete"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_leaves_nothing(tmp_path, wikitext, dataset, name, content, sentence):
    (tmp_path / "in").mkdir()
    if content:
        content = content(wikitext[0].read_bytes()) if callable(content) else content
        (tmp_path / "in" / name).write_bytes(content)
    given = ["--input", tmp_path / "in"] if name else []
    done = prepare(dataset, *given, "--out", tmp_path / "out", check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("prepare.py: error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("dataset", "flags", "sentence"),
    [
        ("wikitext103", ["--level", "word", "--bpe-merges", "9"], "--bpe-merges has no meaning with the level word"),
        ("wikitext103", ["--seed", "2"], "--seed has no meaning where the split is given by names"),
        ("text", ["--split", "given", "--valid-fraction", "0.1"], "--valid-fraction has no meaning where the split"),
        ("text", ["--tokenise", "none", "--language", "fr"], "--language has no meaning with --tokenise none"),
        ("text", ["--vocab-from", "x", "--dict-size", "9"], "--dict-size has no meaning with --vocab-from"),
        ("text", ["--bpe", "hf_byte_bpe", "--level", "word"], "--bpe has no meaning with the level word"),
        ("text", ["--bpe", "hf_byte_bpe", "--tokenise", "moses"], "--tokenise must be none with --bpe hf_byte_bpe"),
        ("text", ["--bpe", "hf_byte_bpe", "--dict-size", "9"], "--dict-size has no meaning with --bpe hf_byte_bpe"),
        ("text", ["--bpe", "hf_byte_bpe", "--bpe-merges", "0"], "--bpe-merges must be at least 1, not 0."),
        ("text", ["--bpe-sample-mb", "inf"], "--bpe-sample-mb must be at least 0.001 and finite, not inf."),
        ("text", ["--shard-mb", "nan"], "--shard-mb must be at least 0.001 and finite, not nan."),
        ("text", ["--shard-mb", "1e308"], "--shard-mb must be at least 0.001 and finite, not inf."),
        ("text", ["--documents", "lines:²"], "--documents must be ends, file, blank, line, lines:N or wikitext, not"),
        ("recall", ["--values", "1"], "--values must be at least 2, not 1."),
        ("recall", ["--pairs", "2"], "--pairs has no meaning with --exercise passkey"),
        ("recall", ["--exercise", "pairs", "--pairs", "20"], "--pairs must not exceed --values 16"),
        ("recall", ["--exercise", "copy", "--longest", "6"], "--longest must be at least 7"),
        ("recall", ["--exercise", "pairs", "--ask", "suddenly"], "where the key announces it: leave it out."),
        ("recall", ["--tokens", "100"], "--tokens must be at least ten times --longest 64, not 100."),
        ("recall", ["--bpe-merges", "9"], "unrecognized arguments: --bpe-merges 9"),
        # Moses would take English rules for a name that it does not know, and only half of them.
        ("text", ["--language", "english"], "--language must be one of as, bn, ca, cjk, cs, de, el, en, "),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(tmp_path, dataset, flags, sentence):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("some words\n")
    inputs = [] if dataset == "recall" else ["--input", tmp_path]
    done = prepare(dataset, *inputs, "--out", tmp_path / "out", *flags, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_single_file_of_a_few_lines_is_told_the_flag_that_splits_it(tmp_path: Path) -> None:
    text, out = tmp_path / "mine.txt", tmp_path / "out"
    text.write_text("\n".join(" ".join(sentences(40, seed)) for seed in range(19)) + "\n")
    command = ("text", "--input", text, "--out", out, "--bpe-merges", "50")
    told = prepare(*command, check=False).stderr
    flag = re.search(r"give (--documents [\w:]+) or a larger", told)
    assert flag is not None, told
    prepare(*command, *flag[1].split(), "--valid-fraction", "0.2", "--test-fraction", "0.2")
    assert all(counts["lines"] > 0 for counts in counts_of(out).values())


SAME_SIZE = {
    "text": ["--level", "word"],
    "chars": [],
    "code": ["--names", "*.txt", "--bpe-merges", "9"],
    "images": ["--valid-fraction", "0.3"],
}


@pytest.mark.parametrize("dataset", SAME_SIZE)
def test_an_input_that_is_edited_to_the_same_size_is_another(dataset, tmp_path):
    for name in ("train/data_batch_1.bin", "test/test_batch.bin", "train/a.txt", "valid/b.txt", "test/c.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name[-5:-4].encode() * (3073 * 40 - 1) + b"\n")
    command = (dataset, "--input", tmp_path / "in", "--out", tmp_path / "out", *SAME_SIZE[dataset])
    prepare(*command)
    edited = tmp_path / "in" / ("train/data_batch_1.bin" if dataset == "images" else "train/a.txt")
    before = edited.read_bytes()
    edited.write_bytes(b"z" + before[1:])
    refused = prepare(*command, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "of a run with other settings" in refused.stderr
    edited.write_bytes(before)
    assert "is prepared already" in prepare(*command).stdout


@pytest.mark.parametrize("kind", ["t", "t.zip"])
def test_files_of_the_same_name_in_several_inputs_are_shared_out_like_others(tmp_path, kind):
    for number in range(3):
        (tmp_path / f"y{number}" / "t").mkdir(parents=True)
        (tmp_path / f"y{number}" / "t" / "book.txt").write_text(f"of {number}\n")
        archived(tmp_path / f"y{number}" / "t.zip", {"book.txt": f"of {number}\n"})
    inputs = [tmp_path / f"y{number}" / kind for number in range(3)]
    prepare("text", "--input", *inputs, "--out", tmp_path / "out", "--level", "word")
    texts = [text_of(tmp_path / "out", split) for split in ("train", "valid", "test")]
    assert sorted(texts) == [f"of {number}\n" for number in range(3)]


@pytest.mark.parametrize(
    ("dataset", "files"),
    [
        ("text", ["a.txt", "b.txt"]),
        ("code", ["a.py", "b.py"]),
        ("code", ["one.py"]),
        ("chars", ["train.txt"]),
        ("wikitext103", ["wiki.train.tokens"]),
        ("simplebooks", ["simplebooks-2/train.txt"]),
        ("bookcorpus", ["books_large_p1.txt", "books_large_p2.txt"]),
        ("cc_news", ["a.txt"]),
    ],
)
def test_what_is_too_little_for_three_splits_is_told_only_of_flags_that_the_data_set_has(tmp_path, dataset, files):
    for name in files:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(f"{name}\nof two lines\n")
    refused = prepare(dataset, "--input", tmp_path / "in", "--out", tmp_path / "out", check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    flags = set(re.findall(r"--[\w-]+", refused.stderr.replace(str(tmp_path), "")))
    assert flags <= set(re.findall(r"--[\w-]+", prepare(dataset, "--help", check=False).stdout))
    assert ("--documents" in refused.stderr) == (dataset == "text")
    assert ("name its files" in refused.stderr) == (dataset in ("text", "chars", "wikitext103", "simplebooks"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "package", "flags"),
    [
        ("sacremoses", "sacremoses", ["--documents", "lines:10"]),
        ("subword_nmt", "subword-nmt", ["--documents", "lines:10"]),
        ("tokenizers", "tokenizers", ["--bpe", "hf_byte_bpe", "--documents", "lines:10"]),
        ("pyarrow", "pyarrow", ["--input", "rows.parquet", "--level", "word"]),
    ],
)
def test_what_is_missing_is_told_before_any_work(missing, package, flags, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("\n".join(sentences(1000, 5)) + "\n")
    Path("rows.parquet").write_bytes(b"PAR1")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["prepare", "text", "--input", "mine.txt", "--out", "out", "--quiet", *flags]) == 2
    said = capsys.readouterr().err
    assert f"needs the package {package}: run pip install {package}" in said
    assert said.count("\n") == 1
    assert not Path("out").exists()
