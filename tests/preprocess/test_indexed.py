"""The binary format and dictionaries against fairseq's own readers and writers, at every width of tokens."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset

from fairseq_ms_pipeline import binarise, files, indexed


@pytest.mark.parametrize("symbols", [10, 65499, 65500, 2**32 - 2, 2**32 - 1])
def test_files_are_those_that_fairseq_writes_and_are_read_as_it_reads_them(symbols: int, tmp_path: Path) -> None:
    sentences = [np.arange(size) % 10 for size in (1, 7, 3)]
    binarise.write_shard(np.concatenate(sentences), [1, 7, 3], tmp_path / "a.b", symbols)
    builder = indexed_dataset.make_builder(str(tmp_path / "theirs.bin"), impl="mmap", vocab_size=symbols)
    for sentence in sentences:
        builder.add_item(torch.from_numpy(sentence))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for end in ("bin", "idx"):
        assert (tmp_path / f"a.b.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()
    assert indexed.read_tokens(tmp_path / "theirs").tolist() == np.concatenate(sentences).tolist()


@pytest.mark.parametrize("size", [0, 4, 6, 11, 12, 13, 40])
@pytest.mark.parametrize("fixed", [(), ("zeros", "b", "a")])
def test_dictionaries_are_those_that_fairseq_makes(size: int, fixed: tuple[str, ...], tmp_path: Path) -> None:
    shards = [{"b": 3, "a": 3, "<unk>": 5, "madeupword0001": 1}, {"c": 9, "a": 1, "\u00e9": 4}]
    theirs = Dictionary()
    for symbol in fixed:
        theirs.add_symbol(symbol, 0)
    padding = 1 if fixed else 8
    for symbol, count in (item for shard in shards for item in Counter(shard).items()):
        theirs.add_symbol(symbol, count)
    theirs.finalize(nwords=size or -1, padding_factor=padding)
    theirs.save(str(tmp_path / "theirs.txt"))
    for number, shard in enumerate(shards):
        files.write_json(tmp_path / f"{number}.json", shard)
    binarise.build_dictionary([tmp_path / "0.json", tmp_path / "1.json"], size, tmp_path / "ours.txt", fixed)
    assert (tmp_path / "ours.txt").read_bytes() == (tmp_path / "theirs.txt").read_bytes()
    assert indexed.read_symbols(tmp_path / "ours.txt") == theirs.symbols


@pytest.mark.parametrize("content", [b"", b"MMIDIDX\0\0", b"TNTIDX\0\0" + b"\0" * 20])
def test_what_is_no_data_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    binarise.write_shard(np.array([4, 2]), [2], tmp_path / "cut", 9)
    (tmp_path / "cut.bin").write_bytes(b"\0")
    (tmp_path / "other.idx").write_bytes(content)
    (tmp_path / "dict.txt").write_text("word\n")
    for refused in (lambda: indexed.read_tokens(tmp_path / "cut"), lambda: indexed.read_index(tmp_path / "other.idx")):
        with pytest.raises(ValueError, match=r"(cut|other)\.idx"):
            refused()
    with pytest.raises(ValueError, match="dict"):
        indexed.read_symbols(tmp_path / "dict.txt")
