"""Byte-level BPE: nothing of a text is lost, and fairseq's own encoder has the same symbols."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from fairseq.data import Dictionary, encoders, indexed_dataset

from fairseq_ms.export import tokenizer
from fairseq_ms_pipeline.files import read_json
from tests.helpers import trained
from tests.preprocess import sample

ODD = "\ufefftabs\tand \u00a0 spaces  \r\n\n\n  東京は 😀👩\u200d👩 é e\u0301 <unk> </s> <s> @@ \u2028 \x0b\n \n"


def prepare(folder: Path, *flags: object) -> str:
    """What is said of the flags; nothing where all is well."""
    return sample.prepare("text", "--input", folder, "--bpe", "hf_byte_bpe", *flags, check=False).stderr


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of texts, of which only the last has anything odd, and what is made of it."""
    folder = tmp_path_factory.mktemp("bytes")
    lines = trained.random_lines(1, 60)
    for split, content in {"train": lines, "valid": lines[:9], "test": ["plain", ODD]}.items():
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{split}.txt").write_text("\n".join(content), encoding="utf-8", newline="\n")
    assert prepare(folder / "texts", "--out", folder / "out", "--bpe-merges", "9") == ""
    return folder / "texts", folder / "out"


def encoder_of(out: Path):
    """fairseq's own, as its commands build it for --bpe hf_byte_bpe."""
    files = {"bpe_vocab": str(out / "vocab.json"), "bpe_merges": str(out / "merges.txt"), "bpe_add_prefix_space": False}
    return encoders.build_bpe(Namespace(bpe="hf_byte_bpe", **files))


@pytest.mark.parametrize("split", ["train", "test"])
def test_fairseq_s_encoder_reads_and_writes_what_was_prepared_and_nothing_is_lost(prepared, split: str) -> None:
    texts, out = prepared
    dictionary = Dictionary.load(str(out / "bin" / "dict.txt"))
    data = indexed_dataset.make_dataset(str(out / "bin" / split), impl="mmap")
    symbols = [dictionary.string(data[index]) for index in range(len(data))]
    given = (texts / f"{split}.txt").read_text("utf-8") if split == "train" else "plain\n" + ODD
    lines = given.removesuffix("\n").split("\n")
    encoder = encoder_of(out)
    assert [encoder.encode(line) for line in lines] == symbols
    assert [encoder.decode(line) for line in symbols] == lines
    assert (out / "text" / f"{split}.txt").read_bytes() == ("\n".join(lines) + "\n").encode()
    counts = read_json(out / "manifest.json")["splits"][split]
    assert (counts["unknown"], counts["lines"], counts["bytes"]) == (0, len(lines), len("\n".join(lines).encode()) + 1)


def test_the_dictionary_has_every_byte_and_a_multiple_of_eight_symbols_most_frequent_first(prepared) -> None:
    dictionary = Dictionary.load(str(prepared[1] / "bin" / "dict.txt"))
    assert len(dictionary) == 272
    assert {*dictionary.symbols[4:]} == {str(number) for number in range(268)}
    assert dictionary.count[4:] == sorted(dictionary.count[4:], reverse=True)


def test_the_pipeline_of_the_folder_gives_the_same_symbols_for_a_text_of_lines(prepared) -> None:
    out = prepared[1]
    lines = tokenizer.lines_of(tokenizer.pipeline_of(out / "bin", None, None, None, None))
    symbols = lines.symbols_of(ODD)
    assert symbols.count("</s>") == ODD.count("\n")
    assert lines.text_of(symbols) == ODD


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--level", "word"], "--bpe has no meaning with the level word: leave it out."),
        (["--tokenise", "moses"], "--tokenise must be none with --bpe hf_byte_bpe, not 'moses'."),
        (["--dict-size", "9"], "--dict-size has no meaning with --bpe hf_byte_bpe: leave it out."),
        (["--bpe-merges", "0"], "--bpe-merges must be at least 1, not 0."),
    ],
)
def test_a_flag_that_cannot_work_with_it_is_refused(flags, sentence, prepared, tmp_path) -> None:
    assert sentence in prepare(prepared[0], "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_without_tokenizers_the_sentence_says_what_to_install(prepared, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    said = prepare(prepared[0], "--out", tmp_path / "out")
    assert "byte-level BPE needs the package tokenizers" in said
    assert not (tmp_path / "out").exists()
