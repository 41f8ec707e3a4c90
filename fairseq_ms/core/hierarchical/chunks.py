"""Segmentation of texts into chunks, and encoders that make one vector of a chunk.

Where a chunk ends depends on the tokens up to there alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.hierarchical.config import HAEDConfig
from fairseq_ms.core.ops.linear import table
from fairseq_ms.core.ops.lstm import LSTM, RaggedSteps


@dataclass(frozen=True)
class ChunkTable:
    """The finished chunks of a batch, and for every token the chunk that it helps to predict.

    A *source* chunk is a run of tokens up to and including the one that ends it; an unfinished last run is none. The
    main model reads source chunks 0..c of a row, and its output c decodes the chunk after them: the positions from the
    end of chunk c to just before the end of chunk c + 1. So every valid position belongs to exactly one decoded chunk,
    and there are as many decoded chunks as source chunks.

    With ``more``, there is one more token in every row: source chunks are those that it ends, and every row has one
    decoded chunk.

    Attributes:
        tokens_WL: the W source chunks of the batch, row by row, padded; L is the longest possible chunk
        row_W: the row of each
        index_W: its place among the source chunks of its row, from 0
        counts_R: source chunks of each row that has any; they add up to W
        position_Q: flat index b * T + t of each of the Q valid positions, in reading order
        decoded_Q: the decoded chunk of that position
        place_Q: its place in that chunk, from 0
        more: whether this is one more token of every row
    """

    tokens_WL: Tensor
    row_W: Tensor
    index_W: Tensor
    counts_R: Tensor
    position_Q: Tensor
    decoded_Q: Tensor
    place_Q: Tensor
    more: bool = False

    @property
    def row_R(self) -> Tensor:
        """The rows with source chunks."""
        return self.row_W if self.more else self.row_W[self.counts_R.cumsum(0) - 1]

    @classmethod
    def of(cls, tokens_BT: Tensor, ends_BT: Tensor, valid_BT: Tensor, pad: int, max_length: int) -> ChunkTable:
        """The table of tokens (B, T) whose chunks end where ``ends_BT`` is True; valid ones come first in each row."""
        ends_BT = ends_BT & valid_BT
        finished_BT = ends_BT.cumsum(dim=1)
        counts_B = finished_BT[:, -1]
        first_B1 = (counts_B.cumsum(0) - counts_B).unsqueeze(1)

        index_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device).expand_as(tokens_BT)
        end_BT = torch.where(ends_BT, index_BT, torch.zeros_like(index_BT)).cummax(dim=1).values
        position_Q = valid_BT.flatten().nonzero().squeeze(1)
        decoded_Q = (first_B1 + finished_BT - 1).flatten()[position_Q]
        place_Q = (index_BT - end_BT).flatten()[position_Q]

        chunk_BT = finished_BT - ends_BT.long()
        start_BT = torch.cat([torch.zeros_like(end_BT[:, :1]), end_BT[:, :-1] + 1], dim=1)
        kept_BT = valid_BT & (chunk_BT < counts_B.unsqueeze(1))
        chunk_X = (first_B1 + chunk_BT)[kept_BT]
        place_X = (index_BT - start_BT)[kept_BT]
        total = int(counts_B.sum())
        tokens_WL = tokens_BT.new_full((total, max_length), pad)
        tokens_WL[chunk_X, place_X] = tokens_BT[kept_BT]
        row_W = torch.repeat_interleave(torch.arange(counts_B.numel(), device=counts_B.device), counts_B)
        index_W = torch.arange(total, device=counts_B.device) - first_B1[row_W, 0]
        return cls(tokens_WL, row_W, index_W, counts_B, position_Q, decoded_Q, place_Q)

    def to_rows(self, x_WD: Tensor) -> Tensor:
        """One vector a chunk, by rows with padding of zeros: (W, D) -> (R, C, D)."""
        rows, most = self.counts_R.numel(), 1 if self.more else int(self.counts_R.max())
        if x_WD.shape[0] == rows * most:
            return x_WD.view(rows, most, -1)
        x_RCD = x_WD.new_zeros(rows, most, x_WD.shape[1])
        return x_RCD.flatten(0, 1).index_copy(0, self._flat_index(most), x_WD).view(rows, most, -1)

    def from_rows(self, x_RCD: Tensor) -> Tensor:
        """The inverse of ``to_rows``: (R, C, D) -> (W, D)."""
        x_ZD = x_RCD.flatten(0, 1)
        if x_ZD.shape[0] == self.tokens_WL.shape[0]:
            return x_ZD
        return x_ZD.index_select(0, self._flat_index(x_RCD.shape[1]))

    def _flat_index(self, most: int) -> Tensor:
        return self.row_W * most + self.index_W

    def in_rows(self) -> RaggedSteps:
        """The source chunks as steps, whose sequences are rows."""
        chunk_W = torch.arange(self.row_W.numel(), device=self.row_W.device)
        return RaggedSteps(chunk_W, self.row_W, self.index_W, chunk_W, chunk_W.numel(), more=self.more)

    def in_chunks(self, tokens_BT: Tensor) -> RaggedSteps:
        """The tokens as steps, whose sequences are decoded chunks."""
        symbol_Q, kept_B = tokens_BT.flatten(), None
        if not self.more:
            symbol_Q, kept_B = symbol_Q.index_select(0, self.position_Q), self.counts_R.cumsum(0) - 1
        return RaggedSteps(
            symbol_Q, self.decoded_Q, self.place_Q, self.position_Q, tokens_BT.numel(), kept_B, self.more
        )

    def begun(self, x_WD: Tensor) -> tuple[Tensor, Tensor]:
        """The rows R that begin a chunk after these, and of each the vector of its last source chunk, (R, D)."""
        if self.more:
            return self.row_W, x_WD
        return self.row_R, x_WD.index_select(0, self.counts_R.cumsum(0) - 1)


class Unfinished:
    """The unfinished chunk of every row.

    Attributes:
        tokens_BL: its tokens so far, padded
        place_B: their number; -1 before the first token of a text
        counts_B: the chunks before it
        fresh: whether nothing has been read
    """

    def __init__(self, rows: int, length: int, pad: int, device: torch.device) -> None:
        self.tokens_BL = torch.full((rows, length), pad, device=device)
        self.place_B = torch.full((rows,), -1, device=device)
        self.counts_B = torch.zeros_like(self.place_B)
        self.fresh = True

    def reorder(self, order: Tensor) -> None:
        self.tokens_BL = self.tokens_BL.index_select(0, order)
        self.place_B = self.place_B.index_select(0, order)
        self.counts_B = self.counts_B.index_select(0, order)


class Segmentation(nn.Module):
    """Splits texts into chunks that end causally (HAED, Section 4 and Appendix A).

    "words" ends a chunk after a separator or after L tokens, "fixed" after every L tokens. A text's first token is a
    chunk by itself, since nothing predicts it: later chunks then consist of predicted tokens and, with pixels, are
    whole pixels.
    """

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__()
        self.kind, self.separators = config.segmentation, config.separators
        self.max_length, self.pad = config.max_segment_len, config.pad

    def forward(
        self, tokens_BT: Tensor, unfinished: Unfinished | None = None, skip_padding: bool = False
    ) -> ChunkTable:
        """The chunks of whole texts (B, T), or of one more token (B, 1) in each row of ``unfinished``.

        Padding is a symbol like others, but with ``skip_padding`` the padding at a row's end is in no chunk.
        """
        if unfinished is not None and not unfinished.fresh:
            return self._one_more(tokens_BT, unfinished)
        valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        if skip_padding:
            valid_BT = before_padding(tokens_BT, self.pad)
        chunks = ChunkTable.of(tokens_BT, self.ends(tokens_BT, valid_BT), valid_BT, self.pad, self.max_length)
        if unfinished is not None:
            unfinished.fresh, unfinished.counts_B = False, chunks.counts_R
            unfinished.place_B = place_B = chunks.place_Q.view(tokens_BT.shape)[:, -1]
            place_L = torch.arange(self.max_length, device=tokens_BT.device)
            column_BL = (tokens_BT.shape[1] - place_B.unsqueeze(1) + place_L).clamp(max=tokens_BT.shape[1] - 1)
            inside_BL = place_L < place_B.unsqueeze(1)
            unfinished.tokens_BL = torch.where(inside_BL, tokens_BT.gather(1, column_BL), self.pad)
        return chunks

    def _one_more(self, tokens_B1: Tensor, unfinished: Unfinished) -> ChunkTable:
        chunk_BL = unfinished.tokens_BL.scatter(1, unfinished.place_B.unsqueeze(1), tokens_B1)
        ends_B, unfinished.place_B = self.advance(unfinished.place_B, tokens_B1[:, 0])
        row_B = torch.arange(ends_B.numel(), device=ends_B.device)
        row_W = ends_B.nonzero().squeeze(1)
        tokens_WL, index_W = chunk_BL[row_W], unfinished.counts_B[row_W]
        unfinished.tokens_BL = chunk_BL.index_fill(0, row_W, self.pad)
        unfinished.counts_B = unfinished.counts_B + ends_B
        one_W = torch.ones_like(row_W)
        return ChunkTable(tokens_WL, row_W, index_W, one_W, row_B, row_B, unfinished.place_B, True)

    def is_separator(self, tokens: Tensor) -> Tensor:
        """True where a token is a separator, for any shape."""
        found = torch.zeros_like(tokens, dtype=torch.bool)
        for symbol in self.separators:
            found |= tokens == symbol
        return found

    def ends(self, tokens_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """True where a valid token is the last of its chunk, (B, T), which depends on tokens up to it alone."""
        index_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device).expand_as(tokens_BT)
        separator_BT = self.is_separator(tokens_BT) & valid_BT
        # After a separator, chunks are as long as they may be until the next one: a chunk ends where the distance from
        # the separator is a multiple of that length. The first token, at distance 0, ends a chunk as well.
        last_BT = torch.where(separator_BT, index_BT, torch.zeros_like(index_BT)).cummax(dim=1).values
        before_BT = torch.cat([last_BT[:, :1], last_BT[:, :-1]], dim=1)
        full_BT = (index_BT - before_BT) % self.max_length == 0
        return separator_BT | (full_BT & valid_BT)

    def advance(self, place_B: Tensor, token_B: Tensor) -> tuple[Tensor, Tensor]:
        """Whether tokens (B,) at these places of their chunks end them, and the next places; -1 begins a text."""
        ends_B = self.is_separator(token_B) | (place_B < 0) | (place_B == self.max_length - 1)
        return ends_B, torch.where(ends_B, torch.zeros_like(place_B), place_B + 1)


class ChunkEncoder(nn.Module, ABC):
    """Encodes chunks of up to L tokens into E numbers each (HAED, Section 3.1, equation 1, and Appendix A).

    Equal chunks are encoded once. Of more units than E, the first E are the encoding; fewer are padded with zeros, as
    in the paper.
    """

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__()
        self.pad, self.symbols, self.out_dim = config.pad, config.symbols, config.width_of_encodings
        self.embed = nn.Embedding(config.symbols, config.token_dim, padding_idx=config.pad)

    def forward(self, tokens_WL: Tensor) -> Tensor:
        """Chunks (W, L), padded on the right -> encodings (W, E)."""
        if tokens_WL.shape[0] == 1:
            return self.encode(tokens_WL)
        distinct_YL, which_W, _ = unique_chunks(tokens_WL)
        return self.encode(distinct_YL).index_select(0, which_W)

    def encode(self, tokens_YL: Tensor) -> Tensor:
        """As ``forward``, without a search for equal chunks."""
        units_YE = self.units(tokens_YL)
        missing = self.out_dim - units_YE.shape[1]
        return F.pad(units_YE, (0, missing)) if missing >= 0 else units_YE[:, : self.out_dim]

    @abstractmethod
    def units(self, tokens_YL: Tensor) -> Tensor:
        """Chunks (Y, L) -> one vector of the encoder's units for each."""


class MLPEncoder(ChunkEncoder):
    """Two layers with ReLU over the L embeddings side by side."""

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__(config)
        units = config.encoder_units or 256
        self.first = nn.Linear(config.max_segment_len * config.token_dim, units)
        self.second = nn.Linear(units, units)

    def units(self, tokens_YL: Tensor) -> Tensor:
        x_YE = self.embed(tokens_YL).flatten(1)
        return self.second(self.first(x_YE).relu()).relu()


class LSTMEncoder(ChunkEncoder):
    """The hidden state of an LSTM after the last token of the chunk."""

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__(config)
        self.lstm = LSTM(config.token_dim, 0, config.encoder_units or 1024)

    def units(self, tokens_YL: Tensor) -> Tensor:
        inside_YL = before_padding(tokens_YL, self.pad)
        chunk_Q, place_Q = inside_YL.nonzero().unbind(1)
        slot_Q = torch.arange(chunk_Q.numel(), device=chunk_Q.device)
        steps = RaggedSteps(tokens_YL[inside_YL], chunk_Q, place_Q, slot_Q, chunk_Q.numel())
        hidden_QU = self.lstm(table(self.embed, self.symbols, tokens_YL.device), None, steps)
        return hidden_QU.index_select(0, inside_YL.sum(dim=1).cumsum(0) - 1)


def before_padding(tokens_BT: Tensor, pad: int) -> Tensor:
    """True up to the last token of each row that is not padding, and at its first token: (B, T)."""
    inside_BT = (tokens_BT != pad).int().flip(1).cummax(dim=1).values.flip(1).bool()
    inside_BT[:, 0] = True
    return inside_BT


def unique_chunks(tokens_WL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The different chunks (Y, L) among W in lexicographic order, the index of each (W,), and counts (Y,)."""
    return torch.unique(tokens_WL, dim=0, return_inverse=True, return_counts=True)
