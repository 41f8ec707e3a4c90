"""Chunks drawn at random from a dataset of blocks, as a function of a seed and of nothing that happened before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from fairseq.data import MonolingualDataset
from torch import Tensor

from fairseq_ms.core.hierarchical.chunks import Segmentation


def random_blocks(dataset: MonolingualDataset, count: int, keys: Sequence[Sequence[int]], pad: int) -> Tensor:
    """``count`` blocks of a fairseq ``MonolingualDataset`` for each key, drawn with replacement: padded tokens.

    (keys * count, T + 1), each a block's source with its last target after it. The same key gives the same blocks.
    """
    indices = [index for key in keys for index in np.random.default_rng(list(key)).integers(len(dataset), size=count)]
    items = [dataset[int(index)] for index in indices]
    rows = [torch.cat([item["source"], item["target"][-1:]]) for item in items]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)


def extended(src_tokens_BT: Tensor, target_BT: Tensor, pad: int) -> Tensor:
    """The source tokens of each row and, after its last one, its last target: (B, T + 1)."""
    tokens_BT = torch.cat([src_tokens_BT, torch.full_like(src_tokens_BT[:, :1], pad)], dim=1)
    lengths_B1 = (src_tokens_BT != pad).sum(dim=1, keepdim=True)
    last_B1 = target_BT.gather(1, (lengths_B1 - 1).clamp(min=0))
    return tokens_BT.scatter(1, lengths_B1, last_B1)


def predicted_chunks(segmentation: Segmentation, tokens_BT: Tensor) -> Tensor:
    """The finished chunks of a batch but the first of each row, which nothing predicts: (X, L) padded tokens."""
    chunks = segmentation(tokens_BT, skip_padding=True)
    return chunks.tokens_WL[chunks.index_W > 0]
