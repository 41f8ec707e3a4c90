"""What language models call of fairseq's compiled modules, in Python, where fairseq was installed without compiling it.

Results are those of the compiled functions, which stay in use where there are any. Batches of fixed shapes, the
Levenshtein transformer and balanced assignment are not here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from omegaconf import DictConfig

from fairseq_ms.errors import UsageError


def batch_by_size_vec(
    indices: np.ndarray, num_tokens_vec: np.ndarray, max_tokens: int, max_sentences: int, bsz_mult: int
) -> list[np.ndarray]:
    """Indices (R,) of rows in batches, in their order.

    Args:
        num_tokens_vec: the tokens of each row, (R,)
        max_tokens: of a batch with padding: its rows times its longest; no limit unless above 0
        max_sentences: rows of a batch; no limit unless above 0
        bsz_mult: a batch has fewer rows than that or a multiple, unless what is left of it would not fit the next one

    Raises AssertionError for a row of more than ``max_tokens``.
    """
    sizes = np.asarray(num_tokens_vec, dtype=np.int64)
    if not len(indices):
        return []
    assert max_tokens <= 0 or sizes.max() <= max_tokens, f"Sentences lengths should not exceed max_tokens={max_tokens}"
    # Rows from begin to end are a batch, and those after them too few to make it a larger one.
    ends, begin, end, longest, longest_after = list[int](), 0, 0, 0, 0
    for place, size in enumerate(sizes.tolist()):
        longest_after = max(longest_after, size)
        rows = place + 1 - begin
        is_full = rows > max_sentences > 0 or rows * max(longest, longest_after) > max_tokens > 0
        if is_full:
            ends.append(end)
            # The rows that are left over begin the next batch; if this row does not fit beside them, they are one.
            if (place + 1 - end) * longest_after > max_tokens > 0:
                ends.append(end := place)
                longest_after = size
            begin, longest = end, 0
        if is_full or rows < bsz_mult or rows % bsz_mult == 0:
            end, longest, longest_after = place + 1, max(longest, longest_after), 0
    return np.split(indices, ends if end == len(indices) else [*ends, end])


def batch_by_size_fn(
    indices: np.ndarray, num_tokens_fn: Callable[[int], int], max_tokens: int, max_sentences: int, bsz_mult: int
) -> list[np.ndarray]:
    """As ``batch_by_size_vec``, of the numbers of tokens that a function gives."""
    sizes = np.fromiter((num_tokens_fn(index) for index in indices), dtype=np.int64, count=len(indices))
    return batch_by_size_vec(indices, sizes, max_tokens, max_sentences, bsz_mult)


def batch_fixed_shapes_fast(*_: Any) -> list[np.ndarray]:
    """Raises UsageError: only data for TPUs, which the plugin refuses, come in batches of fixed shapes."""
    raise UsageError("batches must have no fixed shapes where fairseq is not compiled")


def get_slice_indices(sizes: np.ndarray, break_mode: str, block_size: int, document_sep_len: int) -> np.ndarray:
    """First and last place (C, 2) of each block among all tokens of sentences of these sizes.

    Args:
        break_mode: "none" for blocks of ``block_size`` tokens, "complete" for whole sentences up to so many tokens,
            "complete_doc" for such of one document, "eos" for a sentence each
        document_sep_len: size of what stands between documents

    Raises ValueError for another mode.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    if break_mode == "eos":
        return np.stack([starts, ends], axis=1)
    if break_mode == "none":
        total = int(sizes.sum())
        first = np.arange(0, total, block_size, dtype=np.int64)
        return np.stack([first, np.minimum(first + block_size, total)], axis=1)
    if break_mode not in ("complete", "complete_doc"):
        raise ValueError(f"Invalid break_mode: {break_mode}")
    slices, begin, length = list[tuple[int, int]](), 0, 0
    for size in sizes.tolist():
        separates = break_mode == "complete_doc" and size == document_sep_len
        if length and (separates or length + size > block_size):
            slices.append((begin, begin + length))
            begin, length = begin + length, 0
        if separates:
            begin += size
        else:
            length += size
    slices.append((begin, begin + length))
    # A document of its end alone is none.
    least = 2 if break_mode == "complete_doc" else 1
    return np.array([span for span in slices if span[1] - span[0] >= least], dtype=np.int64).reshape(-1, 2)


def get_block_to_dataset_index(sizes: np.ndarray, slice_indices: np.ndarray) -> np.ndarray:
    """Of each block (C, 2): its first sentence, the place in it, and its last sentence, (C, 3)."""
    edges = np.append(0, np.cumsum(sizes, dtype=np.int64))
    begin, end = slice_indices[:, 0], slice_indices[:, 1]
    first = _sentence_of(edges, begin)
    last = np.where(end > begin, _sentence_of(edges, np.maximum(end - 1, 0)), first)
    return np.stack([first, begin - edges[first], last], axis=1).astype(np.int64)


def _sentence_of(edges: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The sentence that each place lies in; of those that begin there, the first."""
    found = np.searchsorted(edges, places)
    return np.where(edges[found] == places, found, found - 1)


def by_sacrebleu(original: Callable[..., Any], choice: Any, tgt_dict: Any) -> Any:
    """``build_scorer``, whose default counts BLEU by a compiled library, for the last line of ``fairseq-generate``."""
    name = choice._name if isinstance(choice, DictConfig) else choice
    return original("sacrebleu" if name == "bleu" else choice, tgt_dict)


_MODULES = {
    "fairseq.data.data_utils_fast": {
        "batch_by_size_vec": batch_by_size_vec,
        "batch_by_size_fn": batch_by_size_fn,
        "batch_fixed_shapes_fast": batch_fixed_shapes_fast,
    },
    "fairseq.data.token_block_utils_fast": {
        "_get_slice_indices_fast": get_slice_indices,
        "_get_block_to_dataset_index_fast": get_block_to_dataset_index,
    },
}


def has(name: str) -> bool:
    """Whether a compiled module is there and fits the Python, NumPy and torch that run."""
    try:
        importlib.import_module(name)
    except (ImportError, ValueError):
        return False
    return True


def stand_in() -> None:
    """Have functions of this module imported where fairseq's compiled ones are missing."""
    for name, functions in _MODULES.items():
        if not has(name):
            module = ModuleType(name, __doc__)
            vars(module).update(functions)
            sys.modules[name] = module
