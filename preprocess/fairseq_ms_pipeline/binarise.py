"""Stages 5 to 7: dictionary and indexed data sets, byte for byte what `fairseq-preprocess --only-source` writes, but
from finished shards and in bounded memory."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fairseq_ms_pipeline.bpe import ranked
from fairseq_ms_pipeline.files import complete, once_a_file, read_json, write_json
from fairseq_ms_pipeline.indexed import (
    EOS,
    SPECIAL,
    UNKNOWN,
    dtype_for,
    read_index,
    read_symbols,
    write_index,
    write_symbols,
)

COPY_BYTES = 1 << 16
_numbers = once_a_file(lambda path: {symbol: number for number, symbol in enumerate(read_symbols(path))})


def build_dictionary(counts: Iterable[Path], size: int, path: Path, symbols: Iterable[str] = ()) -> None:
    """Merge the shards' symbol counts, keep the `size` most frequent (0: all) and save a fairseq dictionary.

    `size` counts fairseq's four special symbols, as `fairseq-preprocess --nwordssrc` does; the dictionary is
    then padded to a multiple of eight, fairseq's default. With `symbols`, it has exactly these.
    """
    total = dict.fromkeys(symbols, 0)
    padding = 1 if total else 8
    for shard in counts:
        for symbol, count in read_json(shard).items():
            total[symbol] = total.get(symbol, 0) + count
    every = [(symbol, count) for symbol, count in ranked(total) if symbol not in SPECIAL]
    kept = dict(every[: max(0, size - len(SPECIAL)) if size else None])
    number = 0
    while (len(kept) + len(SPECIAL)) % padding:
        kept.setdefault(f"madeupword{number:04d}", 0)
        number += 1
    write_symbols(path, kept)


def vocabulary_counts(counts: Iterable[Path], path: Path) -> dict[str, int]:
    """types: different symbols in the training text, end of line included; dictionary_size: as fairseq counts it."""
    types: set[str] = set()
    for file in counts:
        # One shard's counts at a time: hundreds of them do not fit into memory.
        types.update(read_json(file))
    return {"types": len(types) + 1, "dictionary_size": len(read_symbols(path))}


def write_shard(ids: np.ndarray, lengths: Iterable[int], prefix: Path, vocabulary: int) -> None:
    """Write the ids (n,) of sentences of so many tokens as `prefix`.bin and, when complete, `prefix`.idx."""
    dtype, sizes = dtype_for(vocabulary), np.fromiter(lengths, np.int64)
    with complete(prefix.with_name(prefix.name + ".bin")) as part:
        ids.astype(dtype).tofile(part)
    write_index(prefix.with_name(prefix.name + ".idx"), dtype, [sizes], [(np.cumsum(sizes) - sizes) * dtype.itemsize])


def binarise_shard(text: Path, prefix: Path, dictionary_path: Path) -> int:
    """Write `prefix`.bin, .idx and .json (targets, unknown) for one shard, and return the bytes read."""
    index = _numbers(dictionary_path)
    if text.suffix == ".npy":
        # The end of a line is the last of the table, at -1.
        numbers = (index[str(number)] for number in range(len(index) - len(SPECIAL)))
        ids = np.array([*numbers, EOS])[np.load(text)]
    else:
        found = array("i")
        with open(text, encoding="utf-8", newline="\n") as lines:
            for line in lines:
                found.extend([index.get(word, UNKNOWN) for word in line.split()])
                found.append(EOS)
        ids = np.frombuffer(found, dtype=np.int32)
    ends = np.flatnonzero(ids == EOS)
    write_shard(ids, np.diff(ends, prepend=-1), prefix, len(index))
    write_json(prefix.with_suffix(".json"), {"targets": len(ids), "unknown": int((ids == UNKNOWN).sum())})
    return text.stat().st_size


def merge(prefixes: list[Path], out: Path) -> None:
    """Join shards into one indexed data set `out`.bin, `out`.idx, with no more than their indices mapped at a time."""
    data, index = (out.with_name(out.name + end) for end in (".bin", ".idx"))
    shards = [read_index(prefix.with_name(prefix.name + ".idx")) for prefix in prefixes]
    (dtype,) = {dtype for dtype, _, _ in shards}
    begins = []
    with complete(data) as part, open(part, "wb") as file:
        for prefix in prefixes:
            begins.append(file.tell())
            with open(f"{prefix}.bin", "rb") as shard:
                shutil.copyfileobj(shard, file, COPY_BYTES)
    moved = (starts + begin for (_, _, starts), begin in zip(shards, begins, strict=True))
    write_index(index, dtype, [lengths for _, lengths, _ in shards], moved)
