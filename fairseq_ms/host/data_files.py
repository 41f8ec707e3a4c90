"""Binarised data whose two files fit together, and the dictionary, before a token of it is used.

Cut or garbled data would end in an error from deep inside, in the middle of training, or train on other tokens. The
format has no checksum: a token that has become another one of the dictionary is not noticed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from fairseq.data import indexed_dataset

from fairseq_ms.errors import UsageError
from fairseq_ms.host.wrapping import wrap

# Of fairseq's MMapIndexedDataset: magic, version, code of the data type, number of sentences; then the length of every
# sentence and the byte at which it starts.
_HEADER = struct.Struct("<9sQBQ")
_MAGIC = b"MMIDIDX\x00\x00"
_CHUNK = 1 << 24


def install() -> None:
    """Have fairseq check what it opens; calling it again does nothing."""
    wrap(indexed_dataset, "make_dataset", _checked)


def _checked(
    original: Callable[..., Any], path: str, impl: str, fix_lua_indexing: bool = False, dictionary: Any = None
) -> Any:
    """``make_dataset``, which opens ``path``.bin and ``path``.idx."""
    both = os.path.isfile(f"{path}.idx") and os.path.isfile(f"{path}.bin")
    # What begins like no index fairseq takes for one of its oldest form, whose implementation this is.
    if both and impl in ("mmap", "cached"):
        wrong = _defect(path, len(dictionary) if dictionary is not None else None)
        if wrong is not None:
            raise UsageError(f"DATA must be as fairseq-preprocess wrote it: {wrong}")
    return original(path, impl, fix_lua_indexing=fix_lua_indexing, dictionary=dictionary)


def _defect(path: str, symbols: int | None) -> str | None:
    """What is wrong with an indexed data set over so many symbols."""
    with open(f"{path}.idx", "rb") as file:
        start = file.read(_HEADER.size)
    if start.startswith(indexed_dataset.IndexedDataset._HDR_MAGIC):
        return None
    if len(start) < _HEADER.size:
        return f"{path}.idx is cut off"
    magic, version, code, sentences = _HEADER.unpack(start)
    if (magic, version) != (_MAGIC, 1) or code not in indexed_dataset._code_to_dtype:
        return f"{path}.idx is no index of a data set"
    if os.path.getsize(f"{path}.idx") != _HEADER.size + 12 * sentences:
        return f"{path}.idx has not the size of an index of {sentences} sentences"
    if sentences == 0:
        return None
    kind = np.dtype(indexed_dataset._code_to_dtype[code])
    lengths = np.memmap(f"{path}.idx", np.int32, "r", _HEADER.size, (sentences,))
    starts = np.memmap(f"{path}.idx", np.int64, "r", _HEADER.size + lengths.nbytes, (sentences,))
    ends = starts + lengths * np.int64(kind.itemsize)
    size = os.path.getsize(f"{path}.bin")
    # One half of a data set begins or ends with it.
    whole = lengths.min() >= 0 and (starts[1:] == ends[:-1]).all() and starts[0] >= 0 and ends[-1] <= size
    some = ends[-1] > starts[0] or not size
    if not (whole and some and (starts[0] == 0 or ends[-1] == size)):
        return f"{path}.idx and {path}.bin do not fit together"
    if symbols is not None and size:
        tokens = np.memmap(f"{path}.bin", kind, "r", 0, (size // kind.itemsize,))
        for begin in range(0, len(tokens), _CHUNK):
            part = tokens[begin : begin + _CHUNK]
            if part.min() < 0 or part.max() >= symbols:
                return f"{path}.bin has tokens that are not among the dictionary's {symbols} symbols"
    return None
