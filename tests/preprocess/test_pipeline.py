"""The shared pipeline: fairseq's own result, byte for byte, whatever the shards and workers."""

import json
import tracemalloc
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary, indexed_dataset
from fairseq_cli import preprocess as fairseq_preprocess

from fairseq_ms_pipeline.cli import plan
from fairseq_ms_pipeline.dataset import Expected
from fairseq_ms_pipeline.manifest import differences
from fairseq_ms_pipeline.run import run
from fairseq_ms_pipeline.subwords import Segmenter
from tests.preprocess.sample import DATASET, job_of, prepare, tree, write_sample


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
            segmenter = Segmenter(out / "codes.bpe")
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


@pytest.mark.parametrize("level", ["bpe", "hf_byte_bpe"])
def test_the_result_depends_neither_on_workers_nor_on_shard_size(tmp_path, level):
    source, found = write_sample(tmp_path / "sample.txt"), []
    dataset = replace(DATASET, level=level, tokenise="moses" if level == "bpe" else "none")
    for workers, shard_bytes in ((1, 1500), (2, 1500), (1, 100_000), (2, 1000)):
        out = tmp_path / f"{workers}-{shard_bytes}"
        run(job_of(source, out, replace(dataset, shard_bytes=shard_bytes), workers=workers))
        found.append({name: content for name, content in tree(out).items() if name != "manifest.json"})
    assert found[1:] == found[:-1]


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
        assert counts["lines"] == len(data) == text.count("\n")
        assert counts["characters"] == len(text)
    for name, facts in manifest["files"].items():
        assert sha256((out / name).read_bytes()).hexdigest() == facts["sha256"], name
    assert not (out / ".work").exists()
    assert manifest["vocabulary"]["dictionary_size"] == len(Dictionary.load(str(out / "bin" / "dict.txt")))


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
    with pytest.raises(ValueError, match=r"--out .*sample\.txt is a file: name a folder"):
        run(job_of(source, source))


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


@pytest.mark.parametrize("content", [{"name": "x"}, {"settings": {}}, {"settings": [], "files": {}}, [], "x"])
def test_another_program_s_manifest_is_refused_by_the_flag_that_names_its_folder(tmp_path, content):
    source, folder = write_sample(tmp_path / "sample.txt", lines=3), tmp_path / "theirs"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"--out .*manifest\.json"):
        run(job_of(source, folder))
    with pytest.raises(ValueError, match=r"--vocab-from .*manifest\.json"):
        run(job_of(source, tmp_path / "out", vocabulary_from=folder))
    assert (list(folder.iterdir()), (tmp_path / "out").exists()) == ([folder / "manifest.json"], False)


@pytest.mark.parametrize(
    ("documents", "advice"),
    [
        ("file", "--documents lines:10"),
        ("lines:50", "--documents lines:5"),
        ("lines:2", "--documents lines:1"),
        ("lines:1", "a larger --valid-fraction "),
    ],
)
def test_an_empty_split_leaves_nothing_and_the_advice_names_documents_that_are_smaller(tmp_path, documents, advice):
    source = tmp_path / "sample.txt"
    source.write_text("one line of four\n" * 4)
    dataset = replace(DATASET, name="text", documents=documents, valid_fraction=0.01, test_fraction=0.01)
    with pytest.raises(ValueError, match="--input has no text for the split ") as refused:
        run(job_of(source, tmp_path / "out", dataset))
    assert advice in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("documents", ["ends", "lines:1"])
def test_of_fewer_lines_than_splits_the_advice_is_more_text(tmp_path, documents):
    source = tmp_path / "sample.txt"
    source.write_text("one line\nand another\n")
    with pytest.raises(ValueError, match=r"no text for the split .*: give it more text, at least 3 lines\.$"):
        run(job_of(source, tmp_path / "out", replace(DATASET, name="text", documents=documents)))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("bpe_merges", 0, "--bpe-merges must be at least 1, not 0"),
        ("shard_bytes", 1, "--shard-mb must be at least 0.001"),
        ("documents", "page", "--documents must be .* not 'page'"),
        ("documents", "lines:x", "--documents must be .* not 'lines:x'"),
        ("documents", "lines:²", "--documents must be .* not 'lines:²'"),
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


def test_a_count_that_differs_from_the_papers_is_warned_of():
    manifest = {"splits": {"train": {"targets": 900}, "valid": {}, "test": {}}, "vocabulary": {"types": 50}}
    expected = (
        Expected("train", "targets", 1000, "Table 1", tolerance=0.05),
        Expected("vocabulary", "types", 50, "Table 1"),
    )
    found = differences(replace(DATASET, expected=expected), manifest)
    assert found == ["train has 900 targets, where Table 1 has 1,000."]


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    source = write_sample(tmp_path / "sample.txt")
    before = tree(tmp_path)
    done = prepare("text", "--input", source, "--out", tmp_path / "out", "--dry-run")
    assert "nothing is written" in done.stdout
    assert "30,000 BPE operations" in done.stdout
    assert tree(tmp_path) == before
    job = job_of(source, tmp_path / "out", vocabulary_from=None)
    assert "valid 0.2, test 0.2 of documents (blank)" in plan(job)


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Python's own peak of one process that does every stage, for a text and for ten times as much of it."""
    text = write_sample(tmp_path / "sample.txt", lines=400).read_text(encoding="utf-8")
    # The tokeniser's tables, read when it is first used, are no matter of the corpus.
    run(job_of(tmp_path / "sample.txt", tmp_path / "first"))
    peaks = []
    for repetitions in (10, 100):
        source = tmp_path / f"{repetitions}.txt"
        source.write_text(text * repetitions, encoding="utf-8")
        dataset = replace(DATASET, tokenise="none", shard_bytes=20_000, bpe_merges=400, bpe_sample_bytes=50_000)
        tracemalloc.start()
        run(job_of(source, tmp_path / f"out-{repetitions}", dataset))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # What grows is the bookkeeping of shards, about a kilobyte each: a twentieth of these shards of 20 kB, nothing
    # of shards of 8 MB. A pipeline that held the text would grow by at least as much as the text does.
    assert peaks[1] - peaks[0] < 0.1 * (len(text.encode()) * 90)
