"""From tokens to chunks: where a chunk ends is a function of the tokens read so far and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ChunkTable:
    """The finished chunks of a batch, and for every token the chunk whose tokens it helps to predict.

    A *source* chunk is a run of tokens up to and including the one that ends it; an unfinished last run is none. The
    main model reads source chunks 0..c of a row and its output c decodes the chunk behind them: the *outputs* at
    positions from the end of chunk c to just before the end of chunk c + 1. Every valid position therefore belongs to
    exactly one decoded chunk, and there are as many decoded chunks as source chunks.

    Attributes:
        tokens_ML: the M source chunks of the batch, row by row, padded with ``pad``; L is the greatest chunk length.
        counts_B: the number of source chunks of each row; they add up to M.
        position_P: flat index b * T + t of each of the P valid positions, in reading order.
        decoded_P: which of the M decoded chunks the output at that position belongs to.
        place_P: its place in that chunk, from 0.
    """

    tokens_ML: Tensor
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

        index_BT = valid_BT.cumsum(dim=1) - 1
        end_BT = torch.where(ends_BT, index_BT, torch.zeros_like(index_BT)).cummax(dim=1).values
        position_P = valid_BT.flatten().nonzero().squeeze(1)
        decoded_P = (first_B1 + finished_BT - 1).flatten()[position_P]
        place_P = (index_BT - end_BT).flatten()[position_P]

        chunk_BT = finished_BT - ends_BT.long()
        start_BT = torch.cat([torch.zeros_like(end_BT[:, :1]), end_BT[:, :-1] + 1], dim=1)
        kept_BT = valid_BT & (chunk_BT < counts_B.unsqueeze(1))
        chunk_Q = (first_B1 + chunk_BT)[kept_BT]
        place_Q = (index_BT - start_BT)[kept_BT]
        total = int(counts_B.sum())
        tokens_ML = tokens_BT.new_full((total, max_length), pad)
        tokens_ML[chunk_Q, place_Q] = tokens_BT[kept_BT]
        return cls(tokens_ML, counts_B, position_P, decoded_P, place_P)

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

    def index_M(self) -> Tensor:
        """The index of each of the M chunks within its row, from 0."""
        flat_M = torch.arange(self.tokens_ML.shape[0], device=self.counts_B.device)
        return flat_M - torch.repeat_interleave(self.counts_B.cumsum(0) - self.counts_B, self.counts_B)

    def row_M(self) -> Tensor:
        """The row of each of the M chunks."""
        return torch.repeat_interleave(torch.arange(self.counts_B.numel(), device=self.counts_B.device), self.counts_B)

    def last_B(self) -> Tensor:
        """The last chunk of each row."""
        return self.counts_B.cumsum(0) - 1

    def row_index(self) -> Tensor:
        """Flat index b * C + c of each of the M chunks."""
        rows, most = self.counts_B.numel(), int(self.counts_B.max())
        inside_BC = torch.arange(most, device=self.counts_B.device) < self.counts_B.unsqueeze(1)
        return inside_BC.view(rows * most).nonzero().squeeze(1)


class Segmentation(nn.Module):
    """Split a token stream into chunks that end causally (HAED, Section 4 and Appendix A).

    ``words`` ends a chunk after a separator symbol or after ``max_length`` tokens, ``fixed`` after every ``max_length``
    tokens. The first token of a sequence is a chunk by itself: it is what is known before anything is predicted, so
    the chunks behind it are chunks of *predicted* tokens and, with pixels, fall on whole pixels.

    Args:
        kind: ``words`` or ``fixed``.
        max_length: the greatest number of tokens in a chunk, at least 1.
        separators: indices of the symbols that end a word; needed by ``words``, not allowed with ``fixed``.
        vocabulary: number of symbols V.
        pad: index of the padding symbol.

    Raises:
        ValueError: for a kind, length or set of separators outside these rules.
    """

    is_separator_V: Tensor

    def __init__(self, kind: str, max_length: int, separators: tuple[int, ...], vocabulary: int, pad: int) -> None:
        super().__init__()
        if kind not in ("words", "fixed"):
            raise ValueError(f"segmentation must be words or fixed, not {kind!r}")
        if max_length < 1:
            raise ValueError(f"the greatest chunk length must be at least 1, not {max_length}")
        if (kind == "words") != bool(separators):
            raise ValueError(f"separators belong to words and to nothing else, got {separators!r} with {kind!r}")
        self.kind = kind
        self.max_length = max_length
        self.pad = pad
        is_separator_V = torch.zeros(vocabulary, dtype=torch.bool)
        is_separator_V[list(separators)] = True
        # Derived from the dictionary, so it is rebuilt and not stored in checkpoints.
        self.register_buffer("is_separator_V", is_separator_V, persistent=False)

    def forward(self, tokens_BT: Tensor, padded: bool = True) -> ChunkTable:
        """The chunks of a batch of tokens; unless ``padded``, the padding symbol is a token like the others."""
        valid_BT = tokens_BT != self.pad if padded else torch.ones_like(tokens_BT, dtype=torch.bool)
        valid_BT[:, 0] = True
        return ChunkTable.of(tokens_BT, self.ends(tokens_BT, valid_BT), valid_BT, self.pad, self.max_length)

    def ends(self, tokens_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """True where a token is the last of its chunk; (B, T) tokens to (B, T) booleans.

        Positions that are not valid are padding: they end nothing and count for nothing, wherever they stand. What
        ends at position t depends on positions up to t only.
        """
        index_BT = valid_BT.cumsum(dim=1) - 1
        separator_BT = self.is_separator_V[tokens_BT] & valid_BT
        # A separator restarts the count and so does reaching the greatest length: within the run after a separator the
        # chunks are as long as they may be, and the place of a token is its distance to the separator, modulo that. The
        # first token is at distance 0 of where counting starts, and so ends its chunk.
        last_BT = torch.where(separator_BT, index_BT, torch.zeros_like(index_BT)).cummax(dim=1).values
        before_BT = torch.cat([last_BT[:, :1], last_BT[:, :-1]], dim=1)
        full_BT = (index_BT - before_BT) % self.max_length == 0
        return separator_BT | (full_BT & valid_BT)

    def advance(self, place_B: Tensor, token_B: Tensor) -> tuple[Tensor, Tensor]:
        """One step of ``ends``: from a token and its place in its chunk to whether it ends it and the next place.

        A negative place marks the first token of a sequence.
        """
        ends_B = self.is_separator_V[token_B] | (place_B < 0) | (place_B == self.max_length - 1)
        return ends_B, torch.where(ends_B, torch.zeros_like(place_B), place_B + 1)
