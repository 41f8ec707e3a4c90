"""Caches of rows that have seen different numbers of positions, since chunks end when their tokens say so."""

from __future__ import annotations

import torch
from torch import Tensor


class RowCaches:
    """Keys and values of every layer of a stack, and how many positions each row has of them.

    Args:
        layers, rows, heads, head_dim: the sizes.
        capacity: positions to allocate; the buffers double when a row is full.
        like: a tensor of the wanted type and device.
    """

    def __init__(self, layers: int, rows: int, heads: int, head_dim: int, capacity: int, like: Tensor) -> None:
        shape = (2, rows, heads, max(capacity, 1), head_dim)
        self.buffers = [like.new_zeros(shape) for _ in range(layers)]
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=like.device)

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.buffers = [buffer.index_select(1, order) for buffer in self.buffers]
        self.lengths_B = self.lengths_B.index_select(0, order)

    def reserve(self, positions: int) -> None:
        """Make room for at least this many positions."""
        two, rows, heads, capacity, head_dim = self.buffers[0].shape
        if positions > capacity:
            grown = [b.new_zeros(two, rows, heads, max(positions, 2 * capacity), head_dim) for b in self.buffers]
            for new, old in zip(grown, self.buffers, strict=True):
                new[:, :, :, :capacity] = old
            self.buffers = grown

    def fill(self) -> list[PrefillCache]:
        """What each layer is to be given to run over the positions from 0 on of all rows at once."""
        return [PrefillCache(buffer) for buffer in self.buffers]

    def one_more(self, rows_R: Tensor | None) -> list[StepCache]:
        """What each layer is to be given for one more position of some rows (or all)."""
        lengths_R = self.lengths_B if rows_R is None else self.lengths_B[rows_R]
        longest = int(lengths_R.max()) + 1
        self.reserve(longest)
        hidden_RS = torch.arange(longest, device=lengths_R.device) > lengths_R.unsqueeze(1)
        bias_RS = self.buffers[0].new_zeros(hidden_RS.shape).masked_fill_(hidden_RS, -torch.inf)
        if rows_R is None:
            self.lengths_B = lengths_R + 1
        else:
            self.lengths_B[rows_R] = lengths_R + 1
        bias = bias_RS[:, None, None, :]
        return [StepCache(buffer, rows_R, lengths_R, longest, bias) for buffer in self.buffers]


class PrefillCache:
    """One layer's cache while the positions from 0 on of all rows are computed at once."""

    bias = None

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def append(self, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        self.buffer[0, :, :, : k_BNTH.shape[2]] = k_BNTH
        self.buffer[1, :, :, : v_BNTH.shape[2]] = v_BNTH
        return k_BNTH, v_BNTH


class StepCache:
    """One layer's cache while one position of some rows is computed, each at its own place.

    The bias (R, 1, 1, S) lets a row see its own positions, the new one included, and not what is left in the buffer
    behind them.
    """

    def __init__(self, buffer: Tensor, rows_R: Tensor | None, lengths_R: Tensor, longest: int, bias: Tensor) -> None:
        self.buffer, self.rows_R, self.lengths_R, self.longest, self.bias = buffer, rows_R, lengths_R, longest, bias

    def append(self, k_RN1H: Tensor, v_RN1H: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows_R
        every = torch.arange(self.lengths_R.numel(), device=self.lengths_R.device) if rows is None else rows
        self.buffer[0, every, :, self.lengths_R] = k_RN1H[:, :, 0].to(self.buffer.dtype)
        self.buffer[1, every, :, self.lengths_R] = v_RN1H[:, :, 0].to(self.buffer.dtype)
        seen = self.buffer[:, :, :, : self.longest]
        seen = seen if rows is None else seen.index_select(1, rows)
        return seen[0], seen[1]
