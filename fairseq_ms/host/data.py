"""Binarised data whose two files fit together and stay the same, and batches that hold every row and all count.

The format has no checksum: a corrupted token would be trained on, and new data be continued at a meaningless place.
So checkpoints hold checksums of the training data, which a resumed run compares; one process reads the data once.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.data import indexed_dataset
from fairseq.data.iterators import BackgroundConsumer
from fairseq.distributed import utils as distributed_utils
from torch import Tensor, distributed

from fairseq_ms.errors import UsageError
from fairseq_ms.host import checkpoints
from fairseq_ms_pipeline import indexed

logger = logging.getLogger(__name__)

# Bytes of which one checksum is taken, in threads, since that takes longer than reading them.
_CHUNK = 1 << 22
_THREADS = min(8, os.cpu_count() or 1)
# A batch that takes longer than this, in seconds, is not waited for when the process ends.
_PATIENCE = 30.0
# In a batch that is repeated, since criterions may wait for the other processes in every batch.
_REPEATED = "repeated"

# What to do about a checkpoint of other data or sizes.
NEW_RUN = "another --save-dir, checkpoint.save_dir, begins a new run"

# Of all data sets that this process has opened: the path without an ending, and the checksum.
checksums: dict[str, int] = {}


def make_checked(
    original: Callable[..., Any], path: str, impl: str, fix_lua_indexing: bool = False, dictionary: Any = None
) -> Any:
    """``make_dataset``, which opens ``path``.bin and ``path``.idx, where these fit together and the dictionary."""
    binarised = os.path.isfile(f"{path}.idx") and os.path.isfile(f"{path}.bin")
    found = indexed_dataset.infer_dataset_impl(path) if binarised else None
    if found not in (None, "raw", "cached" if impl == "lazy" else impl):
        raise UsageError(f"--dataset-impl must be left out, or be that of DATA: {path} is {found}, got {impl}")
    if binarised and impl not in ("raw", "fasta"):
        # What begins like no index fairseq takes for one of its oldest form, whose implementation is "cached".
        kind = _kind(path) if impl != "huffman" else None
        largest, checksums[os.path.abspath(path)] = _from_first_rank(path, kind)
        if kind is not None and dictionary is not None and largest >= len(dictionary):
            raise _defect(f"{path}.bin has tokens that are not among the dictionary's {len(dictionary)} symbols")
        if kind is None and impl in ("cached", "lazy"):
            return OlderDataset(path, fix_lua_indexing)
    return original(path, impl, fix_lua_indexing=fix_lua_indexing, dictionary=dictionary)


class OlderDataset(indexed_dataset.IndexedDataset):
    """fairseq's older format, each sentence read when it is asked for.

    Of fairseq's own classes, "lazy" has a position in the file that worker processes share, and "cached" wants to be
    told ahead what will be read, which fairseq does not do before the first batch.
    """

    def __getitem__(self, index: int) -> Tensor:
        start, stop = self.data_offsets[index], self.data_offsets[index + 1]
        kept = np.fromfile(f"{self.path}.bin", self.dtype, stop - start, offset=start * self.element_size)
        return torch.from_numpy(kept.astype(np.int64) - self.fix_lua_indexing)


def read_no_more(original: Callable[..., Any], path: str) -> None:
    """``_warmup_mmap_file``, which reads a file so that the system may keep it in memory: it has been read."""


def _defect(wrong: str) -> UsageError:
    return UsageError(f"DATA must be as fairseq-preprocess wrote it: {wrong}")


def _kind(path: str) -> np.dtype | None:
    """The type of an indexed data set's tokens, None for fairseq's older format; UsageError for a wrong index."""
    with open(f"{path}.idx", "rb") as file:
        if file.read(8) == indexed_dataset.IndexedDataset._HDR_MAGIC:
            return None
    try:
        return indexed.checked_index(Path(path))[0]
    except ValueError as error:
        raise _defect(str(error)) from None


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


def training_data(cfg: Any) -> Iterator[tuple[str, str, int]]:
    """The training data opened so far: their name wherever they lie, their path, and their checksum.

    The name is the number of their folder in DATA, and that of the split.
    """
    folders = [os.path.abspath(folder) for folder in utils.split_paths(getattr(cfg.task, "data", None) or "")]
    subset = os.path.basename(cfg.dataset.train_subset)
    for path, checksum in checksums.items():
        folder, name = os.path.split(path)
        if folder in folders and name.startswith(subset):
            yield f"{folders.index(folder)}/{name}", path, checksum


def refuse_changed(cfg: Any, expected: dict[str, int]) -> None:
    """Raise UsageError if the training data opened so far are others than a checkpoint says, by name and checksum."""
    for name, path, checksum in training_data(cfg):
        if expected.get(name, checksum) != checksum:
            raise UsageError(
                f"DATA must be what the checkpoint was trained on: {path}.bin or {path}.idx is not "
                f"({NEW_RUN}, and --reset-dataloader, checkpoint.reset_dataloader=true, an epoch of these data)"
            )


def dictionary_checksum(task: Any) -> int | None:
    """The CRC-32 of a task's symbols in their order; None where it has no dictionary, or several."""
    symbols = getattr(getattr(task, "dictionary", None), "symbols", None)
    return None if symbols is None else zlib.crc32("\n".join(symbols).encode())


def other_dictionary(task: Any, expected: int | None) -> str | None:
    """What is wrong where a task's dictionary is another than a checkpoint, which may be older, says; or None."""
    if expected in (None, found := dictionary_checksum(task)) or found is None:
        return None
    settings = getattr(task, "args", None) or task.cfg
    return f"{utils.split_paths(settings.data)[0]}/dict.txt has other symbols, or another order of them"


def refuse_other_dictionary(original: Callable[..., None], task: Any, state_dict: dict[str, Any]) -> None:
    """``FairseqTask.load_state_dict``; raises UsageError where the model was trained with another dictionary."""
    state = dict(state_dict)
    if wrong := other_dictionary(task, state.pop(checkpoints.DICTIONARY, None)):
        raise UsageError(f"DATA must have the dictionary that the checkpoint was trained with: {wrong}")
    original(task, state)


def batch_rows(
    original: Callable[..., Any],
    indices: Any,
    num_tokens_fn: Any,
    num_tokens_vec: Any = None,
    max_tokens: int | None = None,
    max_sentences: int | None = None,
    required_batch_size_multiple: int = 1,
    fixed_shapes: Any = None,
) -> Any:
    """``batch_by_size``, which drops a last batch that is no multiple, and says here how many rows that leaves out.

    Raises UsageError where it leaves none to read.
    """
    flag = f"--{checkpoints.MULTIPLE.replace('_', '-')}"
    if required_batch_size_multiple < 1:
        raise UsageError(f"{flag} must be at least 1: got {required_batch_size_multiple}")
    if isinstance(indices, GeneratorType):
        indices = np.fromiter(indices, dtype=np.int64)
    # fairseq looks at the last batch of none.
    multiple = required_batch_size_multiple if len(indices) else 1
    limits = max_tokens, max_sentences, multiple, fixed_shapes
    batches = original(indices, num_tokens_fn, num_tokens_vec, *limits)
    left_out = len(indices) - sum(map(len, batches))
    if left_out and not len(batches):
        raise UsageError(f"{flag} must leave a batch of the {len(indices)} rows, as 1 does: got {multiple}")
    if left_out and distributed_utils.get_global_rank() == 0:
        logger.warning(f"{flag} {multiple} leaves out {left_out} of {len(indices)} rows, and 1 none")
    return batches


def validate_any(original: Callable[..., Any], task: Any, sample: Any, *args: Any, **settings: Any) -> Any:
    """``valid_step``, which fairseq-validate also calls in a process that has a batch less than others."""
    if sample is None or (isinstance(sample, dict) and not sample):
        return 0.0, 0, {}
    return original(task, sample, *args, **settings)


def with_repeated(samples: list[Any], batch: dict[str, Any]) -> list[Any]:
    """The batches of an update, with ``batch``, which ``counting`` leaves out, in the places of those that are missing.

    With ``--update-freq``, a process can have a batch and then none. fairseq then takes its whole update for empty: it
    uses the gradients, but divides their sum without its tokens and leaves its losses out of the log.
    """
    return [sample or {**batch, _REPEATED: True} for sample in samples]


def counting(train_step: Callable[..., Any], sample: dict[str, Any], *args: Any, **settings: Any) -> Any:
    """A task's ``train_step``, to which repeated batches are nothing."""
    if not sample.get(_REPEATED):
        return train_step(sample, *args, **settings)
    loss, size, logged = train_step(sample, *args, **{**settings, "ignore_grad": True})
    return loss, 0 * size, {name: 0 * value for name, value in logged.items()}


def end_reading_ahead() -> None:
    """Wait for the threads that read batches ahead, each of which ends with its current one.

    Where the interpreter's end finds one inside torch, a training that has succeeded aborts with exit code 134.
    """
    until = time.monotonic() + _PATIENCE
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0
            while thread.is_alive() and time.monotonic() < until:
                try:
                    thread._queue.get_nowait()  # which it may be waiting to put another into
                except queue.Empty:
                    thread.join(0.01)


atexit.register(end_reading_ahead)


def spread(batches: Sequence[Any], tokens_of: Callable[[int], int], tokens: int | None) -> tuple[Any, ...]:
    """As many batches as have about so many tokens, and one at least, at even distances; all of them for None."""
    total = sum(int(tokens_of(row)) for batch in batches for row in batch) if tokens is not None else 0
    count = len(batches) if tokens is None or total <= tokens else max(1, len(batches) * tokens // total)
    return tuple(batches[index * len(batches) // count] for index in range(count))
