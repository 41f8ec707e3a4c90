"""Blocks of a corpus whose boundaries lie elsewhere in every epoch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from fairseq.data import MonolingualDataset, TokenBlockDataset
from fairseq.data.token_block_utils_fast import _get_block_to_dataset_index_fast


class OffsetBlocks(TokenBlockDataset):
    """fairseq's blocks of equally many tokens, after a first one that may have fewer.

    Args:
        blocks: fairseq's own, of the same sentences.
        tokens: of a block, T; the last one has what is left.
        first: tokens of the first block, 1 to T.
    """

    def __init__(self, blocks: TokenBlockDataset, tokens: int, first: int) -> None:
        self.first = first
        lines = blocks.dataset
        super().__init__(
            lines, lines.sizes, tokens, pad=blocks.pad, eos=blocks.eos, break_mode="none", include_targets=True
        )

    def _build_slice_indices(
        self, sizes: Any, break_mode: str, document_sep_len: int, block_size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of every block its length, the sentences it lies in, and its place in the corpus."""
        sizes = np.asarray(sizes, dtype=np.int64)
        total = int(sizes.sum())
        ends = np.append(np.arange(self.first, total, block_size, dtype=np.int64), total)
        slices = np.stack([np.append(0, ends[:-1]), ends], axis=1)
        return ends - slices[:, 0], _get_block_to_dataset_index_fast(sizes, slices), slices


def at_random_offset(dataset: MonolingualDataset, tokens: int, key: tuple[int, ...]) -> MonolingualDataset:
    """``dataset`` with blocks of ``tokens`` whose boundaries are drawn by ``key``, every offset equally likely.

    Every token is the target of one block, as before; there is at most one block more.
    """
    moved = copy.copy(dataset)
    moved.dataset = OffsetBlocks(dataset.dataset, tokens, int(np.random.default_rng(key).integers(1, tokens + 1)))
    moved.sizes = np.array(moved.dataset.sizes)
    return moved
