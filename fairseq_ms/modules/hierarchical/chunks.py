"""Bookkeeping between tokens and the chunks they fall into: ragged, packed by length, never padded in computation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Sequences of different lengths laid out without padding, longest sequence first.

    ``step_major`` puts step 0 of all sequences first, then step 1 of those that have one, as a recurrent network reads
    them; ``sequence_major`` puts one whole sequence behind the other, so that those of equal length form a rectangle,
    as attention reads them.

    Attributes:
        order_M: the sequences by decreasing length (ties in their given order).
        rank_M: the place of each sequence in that order.
        lengths: their lengths in that order.
        batch_sizes: how many sequences have a step s, for every s.
    """

    order_M: Tensor
    rank_M: Tensor
    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, lengths_M: Tensor) -> Packing:
        """Pack M sequences of the given lengths, each at least 1."""
        order_M = torch.argsort(lengths_M, descending=True, stable=True)
        rank_M = torch.empty_like(order_M)
        rank_M[order_M] = torch.arange(order_M.numel(), device=order_M.device)
        # The shapes of all that follows depend on the data, so the lengths have to be known on the host: one transfer.
        lengths = lengths_M[order_M].tolist()
        assert not lengths or lengths[-1] >= 1, "an empty sequence cannot be packed"
        histogram = [0] * (lengths[0] + 1 if lengths else 1)
        for length in lengths:
            histogram[length] += 1
        longer = len(lengths)
        sizes = []
        for count in histogram[:-1]:
            longer -= count
            sizes.append(longer)
        return cls(order_M, rank_M, tuple(lengths), tuple(sizes))

    def step_major(self, sequence_P: Tensor, step_P: Tensor) -> Tensor:
        """Row in the step-major layout of step ``step_P`` of sequence ``sequence_P``."""
        sizes_S = torch.tensor(self.batch_sizes, device=step_P.device, dtype=torch.long)
        return (sizes_S.cumsum(0) - sizes_S)[step_P] + self.rank_M[sequence_P]

    def sequence_major(self, sequence_P: Tensor, step_P: Tensor) -> Tensor:
        """Row in the sequence-major layout of step ``step_P`` of sequence ``sequence_P``."""
        lengths_M = torch.tensor(self.lengths, device=step_P.device, dtype=torch.long)
        return (lengths_M.cumsum(0) - lengths_M)[self.rank_M[sequence_P]] + step_P

    def rectangles(self) -> list[tuple[int, int]]:
        """(number of sequences, their common length) for each length, in the order of the sequence-major layout."""
        found: list[tuple[int, int]] = []
        for length in self.lengths:
            if found and found[-1][1] == length:
                found[-1] = (found[-1][0] + 1, length)
            else:
                found.append((1, length))
        return found


@dataclass(frozen=True)
class ChunkTable:
    """The finished chunks of a batch, and for every token the chunk whose future it helps to spell.

    A *source* chunk is a run of tokens up to and including the one that ends it; an unfinished last run is none. The
    main model reads source chunks 0..c of a row and its output c decodes the chunk behind them: the *outputs* at
    positions from the end of chunk c to just before the end of chunk c + 1. Every valid position therefore belongs to
    exactly one decoded chunk, and there are as many decoded chunks as source chunks.

    Attributes:
        tokens_ML: the M source chunks of the batch, row by row, padded with ``pad``; L is the greatest chunk length.
        lengths_M: their numbers of tokens.
        counts_B: the number of source chunks of each row; they add up to M.
        position_P: flat index b * T + t of each of the P valid positions, in reading order.
        decoded_P: which of the M decoded chunks the output at that position belongs to.
        place_P: its place in that chunk, from 0.
    """

    tokens_ML: Tensor
    lengths_M: Tensor
    counts_B: Tensor
    position_P: Tensor
    decoded_P: Tensor
    place_P: Tensor

    @classmethod
    def of(cls, tokens_BT: Tensor, ends_BT: Tensor, valid_BT: Tensor, pad: int, max_length: int) -> ChunkTable:
        """Tabulate (B, T) tokens, the first of each row valid, whose chunks end where ``ends_BT`` is True."""
        ends_BT = ends_BT & valid_BT
        finished_BT = ends_BT.cumsum(dim=1)
        counts_B = finished_BT[:, -1]
        first_B1 = (counts_B.cumsum(0) - counts_B).unsqueeze(1)

        number_BT = valid_BT.cumsum(dim=1) - 1
        end_BT = torch.where(ends_BT, number_BT, torch.zeros_like(number_BT)).cummax(dim=1).values
        position_P = valid_BT.flatten().nonzero().squeeze(1)
        decoded_P = (first_B1 + finished_BT - 1).flatten()[position_P]
        place_P = (number_BT - end_BT).flatten()[position_P]

        chunk_BT = finished_BT - ends_BT.long()
        start_BT = torch.cat([torch.zeros_like(end_BT[:, :1]), end_BT[:, :-1] + 1], dim=1)
        kept_BT = valid_BT & (chunk_BT < counts_B.unsqueeze(1))
        chunk_Q = (first_B1 + chunk_BT)[kept_BT]
        place_Q = (number_BT - start_BT)[kept_BT]
        total = int(counts_B.sum())
        tokens_ML = tokens_BT.new_full((total, max_length), pad)
        tokens_ML[chunk_Q, place_Q] = tokens_BT[kept_BT]
        lengths_M = torch.bincount(chunk_Q, minlength=total)
        return cls(tokens_ML, lengths_M, counts_B, position_P, decoded_P, place_P)

    def decode_lengths(self) -> Tensor:
        """Number of outputs of each of the M decoded chunks, at least 1."""
        return torch.bincount(self.decoded_P, minlength=self.tokens_ML.shape[0])

    def to_rows(self, x_MD: Tensor) -> Tensor:
        """Lay one vector per chunk out by row, (M, D) to (B, C, D), zero behind a row's last chunk."""
        rows, most = self.counts_B.numel(), int(self.counts_B.max())
        if x_MD.shape[0] == rows * most:
            return x_MD.view(rows, most, -1)
        x_BCD = x_MD.new_zeros(rows, most, x_MD.shape[1])
        return x_BCD.flatten(0, 1).index_copy(0, self.row_index(), x_MD).view(rows, most, -1)

    def from_rows(self, x_BCD: Tensor) -> Tensor:
        """Undo ``to_rows``: (B, C, D) to (M, D)."""
        x_FD = x_BCD.flatten(0, 1)
        return x_FD if x_FD.shape[0] == self.tokens_ML.shape[0] else x_FD.index_select(0, self.row_index())

    def number_M(self) -> Tensor:
        """The number of each of the M chunks within its row, from 0."""
        numbers_M = torch.arange(self.tokens_ML.shape[0], device=self.counts_B.device)
        return numbers_M - torch.repeat_interleave(self.counts_B.cumsum(0) - self.counts_B, self.counts_B)

    def row_index(self) -> Tensor:
        """Flat index b * C + c of each of the M chunks."""
        rows, most = self.counts_B.numel(), int(self.counts_B.max())
        inside_BC = torch.arange(most, device=self.counts_B.device) < self.counts_B.unsqueeze(1)
        return inside_BC.view(rows * most).nonzero().squeeze(1)


def unique_chunks(tokens_ML: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The different chunks among M padded ones: (U, L) tokens, (M,) the index of each chunk among them, (U,) counts.

    A chunk is encoded without its context, so equal chunks have equal encodings and one computation serves them all.
    The different chunks are in lexicographic order.
    """
    _, which_M, counts_U = torch.unique(_order_codes(tokens_ML), return_inverse=True, return_counts=True)
    # Whichever of a chunk's places is written last holds the same tokens as the others.
    place_U = torch.empty_like(counts_U).scatter_(0, which_M, torch.arange(which_M.numel(), device=which_M.device))
    return tokens_ML[place_U], which_M, counts_U


def _order_codes(tokens_ML: Tensor) -> Tensor:
    """A number (M,) for each chunk, equal for equal ones, and in lexicographic order.

    Tokens are the digits of a number; where not all of a chunk's fit into 63 bits, the numbers of its parts are
    replaced by their ranks. ``torch.unique`` by rows compares them token by token, and takes 20 times as long.
    """
    base = int(tokens_ML.max()) + 1 if tokens_ML.numel() else 1
    digits = max(1, int(63 / math.log2(max(base, 2))))
    codes_M: Tensor | None = None
    for start in range(0, tokens_ML.shape[1], digits):
        part_M = torch.zeros_like(tokens_ML[:, 0])
        for column in range(start, min(start + digits, tokens_ML.shape[1])):
            part_M = part_M * base + tokens_ML[:, column]
        if codes_M is None:
            codes_M = part_M
        else:
            codes_M = _ranks(codes_M) * part_M.numel() + _ranks(part_M)
    assert codes_M is not None
    return codes_M


def _ranks(codes_M: Tensor) -> Tensor:
    return torch.unique(codes_M, return_inverse=True)[1]
