"""Binarised data whose two files fit together, and the dictionary, before a token of it is used.

Cut or garbled data would end in an error from deep inside, in the middle of training, or train on other tokens. The
format has no checksum: a token that has become another one of the dictionary is noticed by ``same_data.py`` alone. One
process reads the tokens once for both, and instead of fairseq, which does so in every process whenever it opens them.
"""

from __future__ import annotations

import functools
import logging
import os
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fairseq.data import indexed_dataset
from fairseq.distributed import utils as distributed_utils
from torch import distributed

from fairseq_ms.errors import UsageError
from fairseq_ms.host.wrapping import wrap

logger = logging.getLogger(__name__)

# Of fairseq's MMapIndexedDataset: magic, version, code of the data type, number of sentences; then the length of every
# sentence and the byte at which it starts.
_HEADER = struct.Struct("<9sQBQ")
_MAGIC = b"MMIDIDX\x00\x00"
# Bytes of which one checksum is taken, in threads, since that takes longer than reading them.
_CHUNK = 1 << 22
_THREADS = min(8, os.cpu_count() or 1)
# Bytes that take long enough to be announced.
_LARGE = 10**9

# Of all data sets that this process has opened: the path without an ending, and the checksum.
checksums: dict[str, int] = {}


def install() -> None:
    """Have fairseq check what it opens; calling it again does nothing."""
    wrap(indexed_dataset, "make_dataset", _checked)
    wrap(indexed_dataset, "_warmup_mmap_file", _not_again)


def _checked(
    original: Callable[..., Any], path: str, impl: str, fix_lua_indexing: bool = False, dictionary: Any = None
) -> Any:
    """``make_dataset``, which opens ``path``.bin and ``path``.idx."""
    if impl not in ("raw", "fasta") and os.path.isfile(f"{path}.idx") and os.path.isfile(f"{path}.bin"):
        # What begins like no index fairseq takes for one of its oldest form, whose implementation this is.
        kind = _kind(path) if impl in ("mmap", "cached") else None
        largest, checksums[os.path.abspath(path)] = _from_first_rank(path, kind)
        if kind is not None and dictionary is not None and largest >= len(dictionary):
            raise _defect(f"{path}.bin has tokens that are not among the dictionary's {len(dictionary)} symbols")
    return original(path, impl, fix_lua_indexing=fix_lua_indexing, dictionary=dictionary)


def _not_again(original: Callable[..., Any], path: str) -> None:
    """``_warmup_mmap_file``, which reads a file so that the system may keep it in memory."""


def _defect(wrong: str) -> UsageError:
    return UsageError(f"DATA must be as fairseq-preprocess wrote it: {wrong}")


def _kind(path: str) -> np.dtype | None:
    """The type of an indexed data set's tokens, None for fairseq's older format; UsageError for a wrong index."""
    with open(f"{path}.idx", "rb") as file:
        start = file.read(_HEADER.size)
    if start.startswith(indexed_dataset.IndexedDataset._HDR_MAGIC):
        return None
    if len(start) < _HEADER.size:
        raise _defect(f"{path}.idx is cut off")
    magic, version, code, sentences = _HEADER.unpack(start)
    if (magic, version) != (_MAGIC, 1) or code not in indexed_dataset._code_to_dtype:
        raise _defect(f"{path}.idx is no index of a data set")
    if os.path.getsize(f"{path}.idx") != _HEADER.size + 12 * sentences:
        raise _defect(f"{path}.idx has not the size of an index of {sentences} sentences")
    kind = np.dtype(indexed_dataset._code_to_dtype[code])
    if sentences == 0:
        return kind
    lengths = np.memmap(f"{path}.idx", np.int32, "r", _HEADER.size, (sentences,))
    starts = np.memmap(f"{path}.idx", np.int64, "r", _HEADER.size + lengths.nbytes, (sentences,))
    ends = starts + lengths * np.int64(kind.itemsize)
    size = os.path.getsize(f"{path}.bin")
    # One half of a data set begins or ends with it.
    whole = lengths.min() >= 0 and (starts[1:] == ends[:-1]).all() and starts[0] >= 0 and ends[-1] <= size
    some = ends[-1] > starts[0] or not size
    if not (whole and some and (starts[0] == 0 or ends[-1] == size)):
        raise _defect(f"{path}.idx and {path}.bin do not fit together")
    return kind


def _from_first_rank(path: str, kind: np.dtype | None) -> tuple[int, int]:
    """What ``_contents`` returns, which the first of all processes finds out for them."""
    found = None
    if distributed_utils.get_global_rank() == 0:
        files = [os.stat(f"{path}{ending}") for ending in (".bin", ".idx")]
        found = _contents(path, kind, *((file.st_size, file.st_mtime_ns) for file in files))
    if distributed.is_initialized():
        found = distributed_utils.broadcast_object(found, 0, distributed_utils.get_global_group())
    assert found is not None
    return found


@functools.cache
def _contents(path: str, kind: np.dtype | None, *unchanged: tuple[int, int]) -> tuple[int, int]:
    """The largest token of a data set, and its checksum: the CRC-32 of the index, and of the CRC-32 of every chunk.

    Files that are ``unchanged``, by size and time, are not read again.
    """
    size = os.path.getsize(f"{path}.bin")
    if size > _LARGE:
        logger.info(f"reading the {size / 1e9:.1f} GB of {path}.bin once, to check them")
    kind = kind or np.dtype(np.uint8)

    def part(start: int) -> tuple[int, int]:
        tokens = np.fromfile(f"{path}.bin", kind, _CHUNK // kind.itemsize, offset=start)
        # Read as unsigned, negative ones are larger than any dictionary.
        return int(tokens.view(f"u{kind.itemsize}").max()), zlib.crc32(tokens.data)

    largest, checksum = -1, zlib.crc32(np.memmap(f"{path}.idx", np.uint8, "r").data)
    with ThreadPoolExecutor(_THREADS) as pool:
        for top, found in pool.map(part, range(0, size // kind.itemsize * kind.itemsize, _CHUNK)):
            largest, checksum = max(largest, top), zlib.crc32(found.to_bytes(4, "little"), checksum)
    return largest, checksum
