"""What a cached decoding keeps of the tokens from which the next block will be pooled."""

from __future__ import annotations

import torch
from torch import Tensor


class RecentTokens:
    """What the next right-aligned blocks will be pooled from: the last tokens of every row, (B, K, D).

    Position p lies in slot (p - 1) mod K, so that the blocks of every scale that divides K are slices.

    Args:
        batch_size: B
        span: K, the coarsest scale
        padding: what stands before the first token
        like_BTD: embeddings, for their width, type and device
    """

    def __init__(self, batch_size: int, span: int, padding: float, like_BTD: Tensor) -> None:
        self.buffer = like_BTD.new_full((batch_size, span, like_BTD.size(-1)), padding)

    def push(self, x_BTD: Tensor, start: int) -> None:
        """Take in the embeddings of positions start .. start + T - 1."""
        span, end = self.buffer.size(1), start + x_BTD.size(1)
        positions = torch.arange(max(start, end - span), end, device=x_BTD.device)
        self.buffer[:, (positions - 1) % span] = x_BTD[:, -positions.numel() :]

    def block(self, position: int, factor: int) -> Tensor:
        """The ``factor`` positions up to ``position``, a multiple of ``factor``: (B, factor, D)."""
        end = (position - 1) % self.buffer.size(1) + 1
        return self.buffer[:, end - factor : end]

    def reorder(self, order: Tensor) -> None:
        self.buffer = self.buffer.index_select(0, order)


class UnfinishedBlock:
    """The positions of the block that is being filled, (B, k, D); the next goes into slot ``count``."""

    def __init__(self, batch_size: int, factor: int, like_BTD: Tensor) -> None:
        self.buffer = like_BTD.new_zeros(batch_size, factor, like_BTD.size(-1))
        self.count = 0

    def push(self, x_BTD: Tensor) -> bool:
        """Take in C positions; whether the last of them finishes a block, whose positions ``buffer`` then has."""
        if x_BTD.size(1) == 0:
            return False
        factor = self.buffer.size(1)
        end = (self.count + x_BTD.size(1) - 1) % factor + 1
        kept = min(end, x_BTD.size(1))
        self.buffer[:, end - kept : end] = x_BTD[:, -kept:]
        self.count = end % factor
        return self.count == 0

    def reorder(self, order: Tensor) -> None:
        self.buffer = self.buffer.index_select(0, order)
