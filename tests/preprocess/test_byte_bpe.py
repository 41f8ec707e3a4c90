"""Byte-level BPE: nothing of a text is lost, and fairseq's own encoder has the same symbols."""

import json
import multiprocessing
import shutil
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fairseq.data import Dictionary, encoders, indexed_dataset

from fairseq_ms.tools import tokenizing
from fairseq_ms_pipeline import byte_bpe, hf_tokenizer
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


class Deaf:
    """A tokenizer that learns for long and hears of no interruption meanwhile, as one of tokenizers' own does."""

    def train(self, *arguments: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        time.sleep(20)

    def train_from_iterator(self, lines: Iterator[str], trainer: object) -> None:
        assert sum(map(len, lines)) == 6
        self.train()


def test_an_interruption_ends_learning_at_once_and_the_bar_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shard.txt").write_text("a b\nc\n")
    monkeypatch.setattr(byte_bpe, "_tokenizer", lambda model: Deaf())
    begun, read = time.monotonic(), 0

    def advance(count: int) -> None:
        nonlocal read
        read += count
        if read == 6:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        byte_bpe.learn([tmp_path / "shard.txt"], 9, tmp_path, 1, advance)
    assert time.monotonic() - begun < 15
    assert not multiprocessing.active_children()
    assert [file.name for file in tmp_path.iterdir()] == ["shard.txt"]


def test_a_process_that_dies_while_it_learns_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shard.txt").write_text("a b\n")
    monkeypatch.setattr(byte_bpe, "_tokenizer", lambda model: signal.raise_signal(signal.SIGKILL))
    with pytest.raises(ValueError, match=r"^BPE cannot be learnt: its process died"):
        byte_bpe.learn([tmp_path / "shard.txt"], 9, tmp_path, 1)


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
    lines = tokenizing.lines_of(tokenizing.pipeline_of(out / "bin", None, None, None, None))
    symbols = lines.symbols_of(ODD)
    assert symbols.count("</s>") == ODD.count("\n")
    assert lines.text_of(symbols) == ODD


def of_hugging_face(folder: Path, **settings: object) -> tokenizers.Tokenizer:
    """A tokenizer that has learnt from the texts, saved in their folder with the settings in place of its own."""
    learnt = tokenizers.ByteLevelBPETokenizer()
    learnt.train(str(folder / "train.txt"), vocab_size=300, special_tokens=["<|endoftext|>", "<pad>"])
    learnt.save(str(folder.parent / "tokenizer.json"))
    found = json.loads((folder.parent / "tokenizer.json").read_text("utf-8"))
    (folder.parent / "tokenizer.json").write_text(json.dumps(found | settings), encoding="utf-8")
    return tokenizers.Tokenizer.from_file(str(folder.parent / "tokenizer.json"))


def test_lines_have_the_tokens_of_a_tokenizer_json(prepared, tmp_path) -> None:
    texts = tmp_path / "texts"
    shutil.copytree(prepared[0], texts)
    theirs = of_hugging_face(texts)
    assert prepare(texts, "--out", tmp_path / "out", "--vocab-from", tmp_path / "tokenizer.json") == ""
    names = {str(number): token for token, number in json.loads((tmp_path / "out/vocab.json").read_text()).items()}
    dictionary = Dictionary.load(str(tmp_path / "out" / "bin" / "dict.txt"))
    data = indexed_dataset.make_dataset(str(tmp_path / "out" / "bin" / "test"), impl="mmap")
    lines = ("plain\n" + ODD).removesuffix("\n").split("\n")
    for line, row in zip(lines, data, strict=True):
        tokens = [names[symbol] for symbol in dictionary.string(row).split()]
        assert tokens == theirs.encode(line, add_special_tokens=False).tokens


def check_tokens(out: Path, theirs: tokenizers.Tokenizer) -> None:
    """That lines are the numbers of a tokenizer's tokens, in its data and by its pipeline, and are undone as by it."""
    dictionary = Dictionary.load(str(out / "bin" / "dict.txt"))
    assert dictionary.symbols[4:] == [str(number) for number in range(theirs.get_vocab_size())]
    data = indexed_dataset.make_dataset(str(out / "bin" / "test"), impl="mmap")
    lines = ("plain\n" + ODD).removesuffix("\n").split("\n")
    pipeline = tokenizing.lines_of(tokenizing.pipeline_of(out / "bin", None, None, None, None))
    for line, row in zip(lines, data, strict=True):
        symbols = [str(number) for number in theirs.encode(line, add_special_tokens=False).ids]
        assert dictionary.string(row).split() == symbols
        assert pipeline.symbols_of(line) == symbols
        assert pipeline.text_of(symbols) == theirs.decode([*map(int, symbols)], skip_special_tokens=False)


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": False}
SPLIT = {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\p{N}{1,3}| ?[^\\s]"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True, "trim_offsets": True}
PREPEND, SPACES = {"type": "Prepend", "prepend": "\u2581"}, {"pattern": {"String": " "}, "content": "\u2581"}
PIECES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "w", "0", "1", "\u2581w"]
BACK = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
DECODERS = [BACK, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
OTHERS: dict[str, Any] = {
    "normalizer": {"normalizer": {"type": "NFC"}},
    "prefix": {"pre_tokenizer": BYTES},
    "split": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, {**BYTES, "use_regex": False}]}},
    "words": {
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "w0": 1, "w1": 2}, "unk_token": "<unk>"},
        "decoder": None,
        "added_tokens": [],
        "post_processor": None,
    },
    "byte_fallback": {
        "normalizer": {"type": "Sequence", "normalizers": [PREPEND, {"type": "Replace", **SPACES}]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": DECODERS},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
        | {"vocab": {name: number for number, name in enumerate(PIECES)}, "merges": [["\u2581", "w"]]},
        "added_tokens": [],
        "post_processor": None,
    },
    "wordpiece": {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
        | {"strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
        | {"max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "w": 1, "##0": 2, "##1": 3, "plain": 4}},
        "added_tokens": [],
        "post_processor": None,
    },
    "unigram": {
        "pre_tokenizer": METASPACE,
        "decoder": METASPACE,
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["<unk>", 0.0], ["\u2581w", -1.0], ["0", -2.0], ["1", -2.5]],
        },
        "added_tokens": [],
        "post_processor": None,
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_lines_have_the_tokens_of_a_tokenizer_json_of_any_other_kind(kind: str, prepared, tmp_path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "out"
    shutil.copytree(prepared[0], texts)
    theirs = of_hugging_face(texts, **OTHERS[kind])
    assert prepare(texts, "--out", out, "--vocab-from", tmp_path / "tokenizer.json") == ""
    check_tokens(out, theirs)
    # What was prepared with it serves other texts, too.
    assert prepare(texts, "--out", tmp_path / "again", "--vocab-from", out) == ""
    assert (tmp_path / "again/bin/test.bin").read_bytes() == (out / "bin/test.bin").read_bytes()


def test_added_tokens_are_tokens_of_lines(prepared, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "out"
    shutil.copytree(prepared[0], texts)
    theirs = of_hugging_face(texts)
    theirs.add_tokens(["plain", "and \u00a0"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    assert prepare(texts, "--out", out, "--vocab-from", tmp_path / "tokenizer.json") == ""
    check_tokens(out, theirs)


WITHOUT_UNKNOWN: dict[str, Any] = {
    "unigram": {"type": "Unigram", "unk_id": None, "vocab": [["\u2581w", -1.0], ["0", -2.0], ["1", -2.5]]},
    "words": {"type": "WordLevel", "vocab": {"w0": 0, "w1": 1}, "unk_token": "<unk>"},
}


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
def test_a_tokenizer_that_cannot_read_the_text_is_one_sentence_and_leaves_nothing(
    kind: str, prepared, tmp_path: Path
) -> None:
    texts = shutil.copytree(prepared[0], tmp_path / "texts")
    of_hugging_face(texts, **OTHERS[kind] | {"model": WITHOUT_UNKNOWN[kind]})
    said = prepare(texts, "--out", tmp_path / "out", "--vocab-from", tmp_path / "tokenizer.json")
    assert "--vocab-from must have tokens for every line, or an unknown one: train-000000.txt has 'w" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_lines_are_whole_and_text_alone_whatever_else_a_tokenizer_json_asks_for(prepared, tmp_path) -> None:
    shutil.copytree(prepared[0], tmp_path / "texts")
    model: dict[str, Any] = {
        **OTHERS["wordpiece"]["model"],
        "vocab": {"[UNK]": 0, "w": 1, "##0": 2, "##1": 3, "plain": 9},
    }
    more: dict[str, Any] = {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    }
    more |= {"padding": {"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None}}
    more["padding"] |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "w"}
    token = {"id": 11, "content": "[PAD]", "single_word": False, "lstrip": False, "rstrip": False}
    more["added_tokens"] = [token | {"normalized": False, "special": True}]
    of_hugging_face(tmp_path / "texts", **{**OTHERS["wordpiece"], "model": model, **more})
    found = hf_tokenizer.load(tmp_path / "tokenizer.json").encode("w01 plain [PAD] w0", add_special_tokens=False).ids
    assert found == [1, 2, 3, 9, 0, 0, 0, 1, 2]
    # Numbers that no token has are symbols, too.
    assert hf_tokenizer.symbols(tmp_path / "tokenizer.json") == [str(number) for number in range(10)]


def test_a_dictionary_beside_a_tokenizer_json_is_that_of_the_data(prepared, tmp_path) -> None:
    texts = tmp_path / "texts"
    shutil.copytree(prepared[0], texts)
    theirs = of_hugging_face(texts)
    # A model may have more symbols than its tokenizer.
    (tmp_path / "dict.txt").write_text("".join(f"{number} 0\n" for number in range(theirs.get_vocab_size() + 5)))
    for number, place in enumerate((tmp_path, tmp_path / "tokenizer.json")):
        out = tmp_path / f"out{number}"
        assert prepare(texts, "--out", out, "--vocab-from", place) == ""
        assert (out / "bin/dict.txt").read_bytes() == (tmp_path / "dict.txt").read_bytes()
        assert read_json(out / "manifest.json")["splits"]["test"]["unknown"] == 0


@pytest.mark.parametrize("text", ["268 9\n3 2\n", "0 0\n1 0\n", "w0 3\n", "no dictionary\n"])
@pytest.mark.parametrize("kind", ["bytes", "split"])
def test_another_dictionary_beside_a_tokenizer_json_is_none_of_it(
    kind: str, text: str, prepared, tmp_path: Path
) -> None:
    texts = shutil.copytree(prepared[0], tmp_path / "texts")
    of_hugging_face(texts, **OTHERS.get(kind, {}))
    command = ("--vocab-from", tmp_path / "tokenizer.json", "--out")
    assert prepare(texts, *command, tmp_path / "alone") == ""
    (tmp_path / "dict.txt").write_text(text)
    assert prepare(texts, *command, tmp_path / "beside") == ""
    assert (tmp_path / "beside/bin/dict.txt").read_bytes() == (tmp_path / "alone/bin/dict.txt").read_bytes()
    said = prepare(texts, "--vocab-from", tmp_path, "--out", tmp_path / "folder")
    assert "is not a prepared folder: it has no manifest.json." in said
    assert not (tmp_path / "folder").exists()


def test_special_tokens_which_no_line_has_need_no_place_in_the_dictionary_beside(prepared, tmp_path: Path) -> None:
    texts = shutil.copytree(prepared[0], tmp_path / "texts")
    theirs = of_hugging_face(texts)
    size = theirs.get_vocab_size()
    theirs.add_special_tokens(["<mask>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "dict.txt").write_text("".join(f"{number} 0\n" for number in range(size)))
    assert prepare(texts, "--out", tmp_path / "out", "--vocab-from", tmp_path) == ""
    assert (tmp_path / "out/bin/dict.txt").read_bytes() == (tmp_path / "dict.txt").read_bytes()


def test_a_folder_that_cannot_be_made_is_named(prepared) -> None:
    assert "/proc/none cannot be read or written: No such file or directory." in prepare(
        prepared[0], "--out", "/proc/none"
    )


@pytest.mark.parametrize("text", ["{}", "[", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_json_that_cannot_be_read_is_refused(text: str, prepared, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    said = prepare(prepared[0], "--out", tmp_path / "out", "--vocab-from", tmp_path / "tokenizer.json")
    assert "tokenizer.json must be a tokenizer.json that tokenizers reads" in said
    assert not (tmp_path / "out").exists()
