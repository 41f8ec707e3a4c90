"""fairseq's binarised data (MMapIndexedDataset) and dictionaries, read and written without fairseq, byte for byte.

PREFIX.bin has the tokens of all sentences. PREFIX.idx has magic, version, code of the data type and number of
sentences; then all lengths (R,) in tokens, and the bytes (R,) at which sentences start.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fairseq_ms_pipeline.files import complete, complete_text

HEADER = struct.Struct("<9sQBQ")
MAGIC = b"MMIDIDX\x00\x00"
# By fairseq's codes; 6 and 7 are floats.
_CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2", 9: "u4", 10: "u8"}
DTYPES: dict[int, np.dtype] = {code: np.dtype(name) for code, name in _CODES.items()}
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNKNOWN = range(4)


def dtype_for(symbols: int) -> np.dtype:
    """fairseq's data type for the tokens of so many symbols."""
    return DTYPES[8 if symbols < 65500 else 9 if symbols < 2**32 - 1 else 5]


def read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """The tokens' data type, each sentence's length, and the byte at which it starts, mapped into memory.

    Read here, since opening the index through fairseq reads ahead into a buffer of 100 MB. ValueError for another file.
    """
    with open(path, "rb") as file:
        magic, version, code, count = HEADER.unpack(file.read(HEADER.size).ljust(HEADER.size, b"\0"))
    if (magic, version) != (MAGIC, 1) or code not in DTYPES:
        raise ValueError(f"{path} is no index of a data set as --dataset-impl mmap writes it")
    if path.stat().st_size != HEADER.size + 12 * count:
        raise ValueError(f"{path} has not the size of an index of {count} sentences")
    if not count:
        return DTYPES[code], np.empty(0, np.int32), np.empty(0, np.int64)
    lengths = np.memmap(path, np.int32, "r", HEADER.size, (count,))
    return DTYPES[code], lengths, np.memmap(path, np.int64, "r", HEADER.size + lengths.nbytes, (count,))


def write_index(path: Path, dtype: np.dtype, lengths: Sequence[np.ndarray], starts: Iterable[np.ndarray]) -> None:
    """Write an index of the lengths of sentences and the bytes they start at, part by part; complete or not at all."""
    (code,) = (code for code, known in DTYPES.items() if known == dtype)
    with complete(path) as part, open(part, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, sum(map(len, lengths))))
        for values in lengths:
            np.asarray(values, np.int32).tofile(file)
        for values in starts:
            np.asarray(values, np.int64).tofile(file)


def checked_index(prefix: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """``read_index`` of PREFIX.idx; ValueError where it does not fit PREFIX.bin."""
    data, index = (prefix.with_name(prefix.name + end) for end in (".bin", ".idx"))
    dtype, lengths, starts = read_index(index)
    size = data.stat().st_size
    if len(lengths):
        ends = starts + lengths * np.int64(dtype.itemsize)
        # One half of a data set begins or ends with it.
        whole = lengths.min() >= 0 and (starts[1:] == ends[:-1]).all() and starts[0] >= 0 and ends[-1] <= size
        some = ends[-1] > starts[0] or not size
        if not (whole and some and (starts[0] == 0 or ends[-1] == size)):
            raise ValueError(f"{index} and {data} do not fit together")
    return dtype, lengths, starts


def read_tokens(prefix: Path) -> np.ndarray:
    """All tokens (n,) of PREFIX.bin that PREFIX.idx tells of, mapped into memory; ValueError where there are none."""
    dtype, lengths, starts = checked_index(prefix)
    if not (tokens := int(lengths.sum(dtype=np.int64))):
        raise ValueError(f"{prefix}.bin is empty")
    return np.memmap(f"{prefix}.bin", dtype, "r", int(starts[0]), (tokens,))


def read_symbols(path: Path) -> list[str]:
    """A dictionary's symbols by their numbers, fairseq's own first; ValueError names a line that is none."""
    symbols = [*SPECIAL]
    with open(path, encoding="utf-8") as file:
        for line in file:
            symbol, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
            if not count.isdecimal():
                raise ValueError(f"{path} is no dictionary of symbols and counts: it has {line.rstrip()!r}")
            symbols.append(symbol)
    return symbols


def write_symbols(path: Path, counts: Mapping[str, int]) -> None:
    """Save a dictionary of these symbols in their order: the first has fairseq's number 4."""
    with complete_text(path) as file:
        file.writelines(f"{symbol} {count}\n" for symbol, count in counts.items())
