"""The shared pipeline: fairseq's own result, byte for byte, whatever the shards, workers and interruptions."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary, data_utils, indexed_dataset
from fairseq_cli import preprocess as fairseq_preprocess
from fairseq_ms_pipeline import binarise, bpe
from fairseq_ms_pipeline import run as pipeline
from fairseq_ms_pipeline.cli import plan
from fairseq_ms_pipeline.dataset import Dataset, Expected
from fairseq_ms_pipeline.documents import Draw, Reader, document_starts
from fairseq_ms_pipeline.manifest import differences
from fairseq_ms_pipeline.run import Job, run
from fairseq_ms_pipeline.shards import write_shards
from fairseq_ms_pipeline.text import decoded, readable_words
from fairseq_ms_pipeline.tokenise import tokenised

from tests.helpers.cli import ROOT, run_cli

DATASET = Dataset(
    name="sample",
    title="Sample",
    level="bpe",
    bpe_merges=120,
    tokenise="moses",
    documents="blank",
    blank_lines="drop",
    valid_fraction=0.2,
    test_fraction=0.2,
    shard_bytes=1500,
)
ODD = ["<unk>", "</s>", "<s>", "name@@", "@@", "a@@@", "x</s>", "naïve", "東京", "\u00a0", "\u2028", "\\", "<pad>"]


def write_sample(path: Path, lines: int = 160, seed: int = 3) -> Path:
    """Text of a few hundred made-up words in which everything stands that could be misread."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 9))) for _ in range(150)] + ODD
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for number in range(lines):
            file.write(" ".join(draw.choices(words, k=draw.randint(1, 12))) + ".\n")
            if number % 3 == 0:
                file.write("\n")
    return path


def job_of(source: Path, out: Path, dataset: Dataset = DATASET, workers: int = 1, **more) -> Job:
    return Job(
        dataset=dataset,
        source=Reader(dataset, [source], seed=1),
        source_bytes=None,
        out=out,
        workers=workers,
        identity={"inputs": [{"name": source.name, "bytes": source.stat().st_size}], "seed": 1},
        quiet=True,
        **more,
    )


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder with their content."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    source = write_sample(folder / "sample.txt")
    run(job_of(source, folder / "out"))
    return source, folder / "out"


@pytest.mark.parametrize("level", ["bpe", "word"])
def test_binarised_files_are_those_of_fairseq_preprocess(tmp_path, level):
    source = write_sample(tmp_path / "sample.txt")
    out = tmp_path / "out"
    run(job_of(source, out, replace(DATASET, level=level)))
    prefixes = []
    for split in ("train", "valid", "test"):
        text = (out / "text" / f"{split}.txt").read_text(encoding="utf-8")
        if level == "bpe":
            segmenter = bpe.Segmenter(out / "codes.bpe")
            text = "".join(segmenter.line(line) + "\n" for line in text.split("\n")[:-1])
        (tmp_path / split).write_text(text, encoding="utf-8")
        prefixes += [f"--{split}pref", str(tmp_path / split)]
    flags = ["--only-source", *prefixes, "--destdir", str(tmp_path / "theirs"), "--workers", "2"]
    fairseq_preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    ours = tree(out / "bin")
    theirs = tree(tmp_path / "theirs")
    assert set(ours) == {"dict.txt"} | {f"{s}.{e}" for s in ("train", "valid", "test") for e in ("bin", "idx")}
    for name, content in ours.items():
        assert content == theirs[name], name


def decoded_split(out: Path, split: str, subwords: bool) -> str:
    """The text that a split's ids stand for, BPE undone by fairseq's own post-processing."""
    dictionary = Dictionary.load(str(out / "bin" / "dict.txt"))
    data = indexed_dataset.make_dataset(str(out / "bin" / split), impl="mmap")
    lines = (dictionary.string(data[i], bpe_symbol="subword_nmt" if subwords else None) for i in range(len(data)))
    return "".join(line + "\n" for line in lines)


@pytest.mark.parametrize("level", ["bpe", "word"])
def test_decoding_the_ids_and_undoing_bpe_gives_the_tokenised_text_byte_for_byte(tmp_path, level):
    source = write_sample(tmp_path / "sample.txt")
    dataset = replace(DATASET, level=level, tokenise="none")
    manifest = run(job_of(source, tmp_path / "out", dataset))
    text = (tmp_path / "out" / "text" / "train.txt").read_bytes()
    assert decoded_split(tmp_path / "out", "train", level == "bpe").encode() == text
    assert manifest["splits"]["train"]["unknown"] == text.split().count(b"<unk>") > 0


def test_the_result_depends_neither_on_workers_nor_on_shard_size(prepared, tmp_path):
    source, out = prepared
    expected = {name: content for name, content in tree(out).items() if name != "manifest.json"}
    for workers, shard_bytes in ((2, 1500), (1, 100_000), (2, 1000)):
        other = tmp_path / f"{workers}-{shard_bytes}"
        run(job_of(source, other, replace(DATASET, shard_bytes=shard_bytes), workers=workers))
        assert {name: content for name, content in tree(other).items() if name != "manifest.json"} == expected


def test_manifest_counts_are_those_of_the_text_and_the_ids(prepared):
    _, out = prepared
    manifest = json.loads((out / "manifest.json").read_text())
    for split, counts in manifest["splits"].items():
        text = (out / "text" / f"{split}.txt").read_text(encoding="utf-8")
        data = indexed_dataset.make_dataset(str(out / "bin" / split), impl="mmap")
        ids = torch.cat([data[i] for i in range(len(data))])
        assert counts["words"] == len(text.split())
        assert counts["words_with_eol"] == len(text.split()) + text.count("\n")
        assert counts["bytes"] == len(text.encode())
        assert counts["targets"] == len(ids)
        assert counts["unknown"] == int((ids == 3).sum())
        assert counts["lines"] == len(data)
    assert manifest["vocabulary"]["dictionary_size"] == len(Dictionary.load(str(out / "bin" / "dict.txt")))


def in_child(action) -> int:
    """Run `action` in a forked process and return the signal that ended it, 0 for none."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.parametrize("level", ["bpe", "word"])
def test_a_run_killed_before_any_file_is_finished_ends_identical_when_started_again(tmp_path, level):
    """Every file takes its final name by os.replace: kill -9 just before each one of them."""
    dataset = replace(DATASET, level=level, bpe_merges=20, shard_bytes=1000)
    source = write_sample(tmp_path / "sample.txt", lines=45)
    run(job_of(source, tmp_path / "whole", dataset))
    expected = tree(tmp_path / "whole")
    replace_file, finished = os.replace, 0

    def killing(at: int):
        count = 0

        def counted(old, new):
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            replace_file(old, new)

        return counted

    def interrupted(at: int, out: Path) -> None:
        os.replace = killing(at)
        run(job_of(source, out, dataset))

    while True:
        out = tmp_path / f"killed-{finished}"
        ended_by = in_child(lambda out=out, at=finished + 1: interrupted(at, out))
        if not ended_by:
            break
        assert ended_by == signal.SIGKILL
        partial = tree(out)
        assert "manifest.json" not in partial or set(expected) <= set(partial)
        assert in_child(lambda out=out: run(job_of(source, out, dataset))) == 0
        assert tree(out) == expected, f"killed before file {finished + 1}"
        finished += 1
    assert finished > 25


def test_finished_shards_are_not_done_again(tmp_path, monkeypatch):
    source = write_sample(tmp_path / "sample.txt")
    out = tmp_path / "out"
    done: list[Path] = []

    def failing(tokenised_path, *rest):
        if len(done) == 3:
            raise ValueError("stopped here")
        done.append(tokenised_path.name)
        return original(tokenised_path, *rest)

    original = pipeline.segment_shard
    monkeypatch.setattr(pipeline, "segment_shard", failing)
    with pytest.raises(ValueError, match="stopped here"):
        run(job_of(source, out))
    first = list(done)

    def counting(tokenised_path, *rest):
        done.append(tokenised_path.name)
        return original(tokenised_path, *rest)

    monkeypatch.setattr(pipeline, "segment_shard", counting)
    manifest = run(job_of(source, out))
    shards = sum(counts["shards"] for counts in manifest["splits"].values())
    assert len(first) == 3
    assert len(done) == len(set(done)) == shards


def dying(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_one_sentence_and_the_next_run_finishes(tmp_path, monkeypatch):
    source = write_sample(tmp_path / "sample.txt")

    monkeypatch.setattr("fairseq_ms_pipeline.run.tokenise_shard", dying)
    with pytest.raises(ValueError, match="fewer --workers than 2"):
        run(job_of(source, tmp_path / "out", workers=2))
    monkeypatch.undo()
    run(job_of(source, tmp_path / "whole"))
    run(job_of(source, tmp_path / "out", workers=2))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_finished_folder_is_left_as_it_is(prepared, capsys):
    source, out = prepared
    before = {f: f.stat().st_mtime_ns for f in out.rglob("*")}
    run(job_of(source, out))
    assert "is prepared already" in capsys.readouterr().out
    assert {f: f.stat().st_mtime_ns for f in out.rglob("*")} == before


def test_a_folder_of_another_run_is_refused_with_the_setting_that_differs(prepared):
    source, out = prepared
    with pytest.raises(ValueError, match=r"--out .*bpe_merges is 120 there and 121 now"):
        run(job_of(source, out, replace(DATASET, bpe_merges=121)))


def test_a_folder_with_foreign_files_is_refused_and_left_alone(tmp_path):
    source = write_sample(tmp_path / "sample.txt")
    (tmp_path / "out" / "bin").mkdir(parents=True)
    (tmp_path / "out" / "bin" / "dict.txt").write_text("of another run 1\n")
    with pytest.raises(ValueError, match=r"--out .* is not empty"):
        run(job_of(source, tmp_path / "out"))
    assert tree(tmp_path / "out") == {"bin/dict.txt": b"of another run 1\n"}


def test_the_vocabulary_of_another_folder_gives_its_dictionary_and_codes(prepared, tmp_path):
    _, out = prepared
    other = write_sample(tmp_path / "other.txt", seed=9)
    run(job_of(other, tmp_path / "out", vocabulary_from=out))
    assert (tmp_path / "out" / "bin" / "dict.txt").read_bytes() == (out / "bin" / "dict.txt").read_bytes()
    assert (tmp_path / "out" / "codes.bpe").read_bytes() == (out / "codes.bpe").read_bytes()


def test_a_vocabulary_that_is_not_of_its_manifest_is_refused(prepared, tmp_path):
    source, out = prepared
    for name, content in tree(out).items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    (tmp_path / "copy" / "bin" / "dict.txt").write_text("word 1\n")
    with pytest.raises(ValueError, match=r"--vocab-from .* bin/dict\.txt is missing or not the one"):
        run(job_of(source, tmp_path / "out", vocabulary_from=tmp_path / "copy"))
    with pytest.raises(ValueError, match="is of level bpe, but this run is of level word"):
        run(job_of(source, tmp_path / "out", replace(DATASET, level="word"), vocabulary_from=out))
    with pytest.raises(ValueError, match="is not a prepared folder"):
        run(job_of(source, tmp_path / "out", vocabulary_from=tmp_path))
    assert not (tmp_path / "out").exists()


def test_text_that_is_not_utf8_is_named_by_file_line_and_byte_offset(tmp_path):
    source = tmp_path / "sample.txt"
    source.write_bytes("\ufefffirst\n".encode() + b"second caf\xe9 line\n")
    with pytest.raises(ValueError, match=r"sample.txt, line 2, byte offset 19: byte 0xe9 is not UTF-8"):
        run(job_of(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="line 1, byte offset 5"):
        list(decoded([b"\xef\xbb\xbfab\xff"], "name"))


def test_an_empty_split_is_one_sentence_and_nothing_is_left(tmp_path):
    source = tmp_path / "sample.txt"
    source.write_text("one line only\n")
    with pytest.raises(ValueError, match="no text for the split valid or test"):
        run(job_of(source, tmp_path / "out", replace(DATASET, documents="blank", valid_fraction=0.01)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("bpe_merges", 0, "--bpe-merges must be at least 1, not 0"),
        ("shard_bytes", 1, "--shard-mb must be at least 0.001"),
        ("documents", "page", "--documents must be .* not 'page'"),
        ("documents", "lines:x", "--documents must be .* not 'lines:x'"),
        ("valid_fraction", 1.5, "--valid-fraction must lie between 0 and 1, not 1.5"),
        ("test_fraction", 0.9, "together must stay below 1"),
        ("dictionary_size", -1, "--dict-size must be 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_is_written(tmp_path, field, value, sentence):
    source = write_sample(tmp_path / "sample.txt", lines=3)
    with pytest.raises(ValueError, match=sentence):
        run(job_of(source, tmp_path / "out", replace(DATASET, **{field: value})))
    with pytest.raises(ValueError, match="--workers must be at least 1, not 0"):
        run(job_of(source, tmp_path / "out", workers=0))
    assert not (tmp_path / "out").exists()


def test_a_second_run_in_the_same_folder_at_the_same_time_is_refused(tmp_path):
    source = write_sample(tmp_path / "sample.txt")
    work = tmp_path / "out" / ".work"
    work.mkdir(parents=True)
    held, ready = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        from fairseq_ms_pipeline.files import only_run_in

        with only_run_in(work):
            os.write(ready[1], b".")
            os.read(held[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(ValueError, match="another run is working"):
            run(job_of(source, tmp_path / "out"))
    finally:
        os.write(held[1], b".")
        os.waitpid(child, 0)
    run(job_of(source, tmp_path / "out"))


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


def test_moses_splits_punctuation_and_escapes_nothing():
    assert tokenised('He said: "it\'s <5> & done".', "moses", "en").split()[:4] == ["He", "said", ":", '"']
    assert "&amp;" not in tokenised("a & b", "moses", "en")


def test_a_random_split_is_of_the_asked_size_and_the_same_for_the_same_seed():
    drawn = [Draw(DATASET, seed).split_of("x") for seed in range(1, 2001)]
    assert abs(drawn.count("valid") / 2000 - 0.2) < 0.03
    assert abs(drawn.count("test") / 2000 - 0.2) < 0.03
    first, second = Draw(DATASET, 5), Draw(DATASET, 5)
    assert [first.split_of("x") for _ in range(50)] == [second.split_of("x") for _ in range(50)]


def test_three_files_fill_all_three_splits_whatever_the_fractions():
    dataset = replace(DATASET, documents="file", valid_fraction=0.01, test_fraction=0.01)
    for seed in range(20):
        draw = Draw(dataset, seed)
        draw.share_out(["a.txt", "b.txt", "c.txt"])
        assert sorted(draw.split_of(name) for name in ("a.txt", "b.txt", "c.txt")) == ["test", "train", "valid"]


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


def test_the_bpe_sample_is_bounded_and_spread_over_the_corpus(tmp_path):
    shards = []
    for number in range(40):
        shards.append(tmp_path / f"{number:02d}")
        shards[-1].write_text("x" * 100)
    chosen = bpe.sample(shards, limit_bytes=1000)
    assert sum(shard.stat().st_size for shard in chosen) <= 1000
    assert [shard.name for shard in chosen] == [f"{n:02d}" for n in range(0, 40, 4)]
    assert bpe.sample(shards, limit_bytes=4000) == shards


def test_a_count_that_differs_from_the_papers_is_warned_of():
    manifest = {
        "splits": {"train": {"targets": 900}, "valid": {}, "test": {}},
        "vocabulary": {"types": 50},
    }
    expected = (
        Expected("train", "targets", 1000, "Table 1", tolerance=0.05),
        Expected("vocabulary", "types", 50, "Table 1"),
    )
    found = differences(replace(DATASET, expected=expected), manifest)
    assert found == ["train has 900 targets, where Table 1 has 1,000."]


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    source = write_sample(tmp_path / "sample.txt")
    before = tree(tmp_path)
    script = ROOT / "preprocess" / "text" / "prepare.py"
    done = run_cli("python", script, "--input", source, "--out", tmp_path / "out", "--dry-run")
    assert "nothing is written" in done.stdout
    assert "30,000 BPE operations" in done.stdout
    assert tree(tmp_path) == before
    job = job_of(source, tmp_path / "out", vocabulary_from=None)
    assert "valid 0.2, test 0.2 of documents (blank)" in plan(job)


def test_shards_are_bounded_and_their_joint_text_is_the_input(tmp_path):
    source = write_sample(tmp_path / "sample.txt")
    dataset = replace(DATASET, blank_lines="keep")
    found = write_shards(Reader(dataset, [source], 1).lines(), tmp_path, 1500)
    longest = max(len(line) for line in source.read_bytes().split(b"\n"))
    names = [name for split in found.values() for name in split["shards"]]
    assert len(names) > 4
    assert all((tmp_path / f"{name}.txt").stat().st_size <= 1500 + longest + 1 for name in names)
    lines = [line for n in names for line in (tmp_path / f"{n}.txt").read_text("utf-8").split("\n")[:-1]]
    assert sorted(lines) == sorted(source.read_text("utf-8").split("\n")[:-1])


def test_the_dictionary_of_a_published_folder_is_read_by_fairseq(prepared):
    _, out = prepared
    dictionary = Dictionary.load(str(out / "bin" / "dict.txt"))
    data = data_utils.load_indexed_dataset(str(out / "bin" / "train"), dictionary)
    assert len(data) == json.loads((out / "manifest.json").read_text())["splits"]["train"]["lines"]


def test_one_shards_symbol_counts_are_in_memory_at_a_time(tmp_path, monkeypatch):
    class Token:
        """Lets weak references count those that are alive."""

    class Counts(dict):
        token: Token

    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    most = []
    read = binarise.read_json

    def spy(path):
        counts = Counts(read(path))
        # A dictionary is equal to another, so the set holds a token of each.
        counts.token = Token()
        alive.add(counts.token)
        most.append(len(alive))
        return counts

    monkeypatch.setattr(binarise, "read_json", spy)
    files = [tmp_path / f"{number}.json" for number in range(9)]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"the": 3, f"word{number}": 1}))
    dictionary = tmp_path / "dict.txt"
    binarise.build_dictionary(files, 0, dictionary)
    assert binarise.vocabulary_counts(files, dictionary)["types"] == 11
    assert len(most) == 18
    # The one being read, and the one before it that the loop still holds.
    assert max(most) <= 2


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Python's own peak of one process that does every stage, for a text and for ten times as much of it."""
    text = write_sample(tmp_path / "sample.txt", lines=400).read_text(encoding="utf-8")
    # The tokeniser's tables, read when it is first used, are no matter of the corpus.
    run(job_of(tmp_path / "sample.txt", tmp_path / "first"))
    peaks = []
    for repetitions in (10, 100):
        source = tmp_path / f"{repetitions}.txt"
        source.write_text(text * repetitions, encoding="utf-8")
        dataset = replace(DATASET, tokenise="none", shard_bytes=20_000, bpe_merges=30, bpe_sample_bytes=50_000)
        tracemalloc.start()
        run(job_of(source, tmp_path / f"out-{repetitions}", dataset))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # What grows is the bookkeeping of shards, about a kilobyte each: a twentieth of these shards of 20 kB, nothing
    # of shards of 8 MB. A pipeline that held the text would grow by at least as much as the text does.
    assert peaks[1] - peaks[0] < 0.1 * (len(text.encode()) * 90)


def test_a_command_with_workers_killed_at_work_can_be_started_again_at_once(tmp_path):
    """kill -9 of the command itself: its orphaned workers neither hold the folder's lock nor spoil its files."""
    source = write_sample(tmp_path / "sample.txt", lines=3000)
    script = ROOT / "preprocess" / "text" / "prepare.py"
    command = [sys.executable, str(script), "--input", str(source), "--documents", "blank", "--bpe-merges", "20"]
    command += ["--workers", "2", "--shard-mb", "0.01", "--quiet"]
    out = tmp_path / "out"
    with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL) as killed:
        while len(list((out / ".work" / "text").glob("*.txt"))) < 3:
            assert killed.poll() is None, "the run must not end before it is killed"
            time.sleep(0.01)
        killed.kill()
    assert not (out / "manifest.json").exists()
    run_cli("python", *command[1:], "--out", out)
    run_cli("python", *command[1:], "--out", tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")
