"""Stages 5 to 7: fairseq's dictionary and indexed data sets, byte for byte what
`fairseq-preprocess --only-source` writes, but from finished shards and in bounded memory."""

from __future__ import annotations

import logging
import os
import shutil
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

# One of fairseq's tasks for speech asks for tensorboardX whenever fairseq is imported.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

from fairseq.data import Dictionary, indexed_dataset  # noqa: E402

from fairseq_ms_pipeline.files import complete, complete_text, once_a_file, part_of, read_json, write_json  # noqa: E402

Index = indexed_dataset.MMapIndexedDataset.Index
# fairseq's MMapIndexedDataset: magic, version, code of the data type, number of sentences; then all lengths, and
# the byte at which each sentence starts.
HEADER = struct.Struct("<9sQBQ")
COPY_BYTES = 1 << 16
_dictionary = once_a_file(lambda path: Dictionary.load(str(path)))


def build_dictionary(counts: Iterable[Path], size: int, path: Path, symbols: Iterable[str] = ()) -> Dictionary:
    """Merge the shards' symbol counts, keep the `size` most frequent (0: all) and save a fairseq dictionary.

    `size` counts fairseq's four special symbols, as `fairseq-preprocess --nwordssrc` does; the dictionary is
    then padded to a multiple of eight, fairseq's default. With `symbols`, it has exactly these.
    """
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol, 0)
    padding = 1 if len(dictionary) > dictionary.nspecial else 8
    for shard in counts:
        for symbol, count in read_json(shard).items():
            dictionary.add_symbol(symbol, count)
    dictionary.finalize(nwords=size or -1, padding_factor=padding)
    with complete_text(path) as file:
        dictionary.save(file)
    return dictionary


def vocabulary_counts(counts: Iterable[Path], path: Path) -> dict[str, int]:
    """types: different symbols in the training text, end of line included; dictionary_size: as fairseq counts it."""
    types: set[str] = set()
    for file in counts:
        # One shard's counts at a time: hundreds of them do not fit into memory.
        types.update(read_json(file))
    return {"types": len(types) + 1, "dictionary_size": len(Dictionary.load(str(path)))}


def write_fixed_dictionary(symbols: list[str], path: Path) -> None:
    """Save a dictionary of the given symbols in the given order: the first has fairseq's index 4."""
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    with complete_text(path) as file:
        dictionary.save(file)


def write_shard(ids: np.ndarray, lengths: list[int], prefix: Path, vocabulary: int) -> None:
    """Write the ids (n,) of sentences of so many tokens as `prefix`.bin and, when complete, `prefix`.idx."""
    part = part_of(prefix)
    dtype = indexed_dataset.best_fitting_int_dtype(vocabulary)
    ids.astype(dtype).tofile(f"{part}.bin")
    with Index.writer(f"{part}.idx", dtype) as index:
        index.write(lengths)
    for end in (".bin", ".idx"):
        os.replace(f"{part}{end}", f"{prefix}{end}")


def binarise_shard(text: Path, prefix: Path, dictionary_path: Path) -> int:
    """Write `prefix`.bin, .idx and .json (targets, unknown) for one shard, and return the bytes read."""
    dictionary = _dictionary(dictionary_path)
    index, unknown, eos = dictionary.indices, dictionary.unk(), dictionary.eos()
    if text.suffix == ".npy":
        # The end of a line is the last of the table, at -1.
        numbers = (index[str(number)] for number in range(len(dictionary) - dictionary.nspecial))
        ids = np.array([*numbers, eos])[np.load(text)]
    else:
        found = array("i")
        with open(text, encoding="utf-8", newline="\n") as lines:
            for line in lines:
                found.extend([index.get(word, unknown) for word in line.split()])
                found.append(eos)
        ids = np.frombuffer(found, dtype=np.int32)
    ends = np.flatnonzero(ids == eos)
    write_shard(ids, np.diff(ends, prepend=-1).tolist(), prefix, len(dictionary))
    write_json(prefix.with_suffix(".json"), {"targets": len(ids), "unknown": int((ids == unknown).sum())})
    return text.stat().st_size


def read_index(path: Path) -> tuple[int, np.ndarray, np.ndarray]:
    """fairseq's code of the data type, each sentence's length, and the byte at which it starts, mapped into memory.

    Read here, since opening the index through fairseq reads ahead into a buffer of 100 MB.
    """
    with open(path, "rb") as file:
        magic, version, code, count = HEADER.unpack(file.read(HEADER.size))
    assert (magic, version) == (Index._HDR_MAGIC, 1), "the index is written by this pipeline"
    lengths = np.memmap(path, np.int32, "r", HEADER.size, (count,))
    return code, lengths, np.memmap(path, np.int64, "r", HEADER.size + lengths.nbytes, (count,))


def merge(prefixes: list[Path], out: Path) -> None:
    """Join shards into one indexed data set `out`.bin, `out`.idx, with no more than their indices mapped at a time."""
    data, index = (out.with_name(out.name + end) for end in (".bin", ".idx"))
    shards = [read_index(prefix.with_name(prefix.name + ".idx")) for prefix in prefixes]
    (code,) = {code for code, _, _ in shards}
    ends = [0]
    with complete(data) as part, open(part, "wb") as file:
        for prefix in prefixes:
            with open(f"{prefix}.bin", "rb") as shard:
                shutil.copyfileobj(shard, file, COPY_BYTES)
            ends.append(file.tell())
    with complete(index) as part, open(part, "wb") as file:
        file.write(HEADER.pack(Index._HDR_MAGIC, 1, code, sum(len(lengths) for _, lengths, _ in shards)))
        for _, lengths, _ in shards:
            lengths.tofile(file)
        for (_, _, starts), before in zip(shards, ends):
            (starts + before).tofile(file)
