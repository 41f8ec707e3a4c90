"""Encoders: from the tokens of one chunk, without any context, to one vector."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops.lstm import LSTM, Steps


class ChunkEncoder(nn.Module, ABC):
    """Encode chunks of up to L tokens into D numbers each (HAED, Section 3.1, equation 1, and Appendix A).

    Equal chunks have equal encodings, so a batch is encoded once per *different* chunk. An encoding with more units
    than D keeps the first D of them, one with fewer is filled up with zeros, as in the paper.

    Args:
        vocabulary: number of symbols V.
        pad: index of the padding symbol, whose embedding is zero.
        embed_dim: width of a token's embedding.
        out_dim: D.
    """

    def __init__(self, vocabulary: int, pad: int, embed_dim: int, out_dim: int) -> None:
        super().__init__()
        self.pad = pad
        self.out_dim = out_dim
        self.embed = nn.Embedding(vocabulary, embed_dim, padding_idx=pad)

    def forward(self, tokens_ML: Tensor) -> Tensor:
        """(M, L) tokens, padded on the right, to (M, D) encodings."""
        distinct_UL, which_M, _ = unique_chunks(tokens_ML)
        return self.encode(distinct_UL).index_select(0, which_M)

    def encode(self, tokens_UL: Tensor) -> Tensor:
        """The same without looking for repetitions."""
        units_UE = self.units(tokens_UL)
        missing = self.out_dim - units_UE.shape[1]
        return F.pad(units_UE, (0, missing)) if missing >= 0 else units_UE[:, : self.out_dim]

    @abstractmethod
    def units(self, tokens_UL: Tensor) -> Tensor:
        """(U, L) tokens to one vector each, as wide as the encoder has units."""


class MLPEncoder(ChunkEncoder):
    """The L embeddings in a row, then two layers with ReLU."""

    def __init__(self, vocabulary: int, pad: int, embed_dim: int, out_dim: int, units: int, length: int) -> None:
        super().__init__(vocabulary, pad, embed_dim, out_dim)
        self.first = nn.Linear(length * embed_dim, units)
        self.second = nn.Linear(units, units)

    def units(self, tokens_UL: Tensor) -> Tensor:
        x_UE = self.embed(tokens_UL).flatten(1)
        return self.second(self.first(x_UE).relu()).relu()


class LSTMEncoder(ChunkEncoder):
    """The hidden state of an LSTM after the last token of the chunk."""

    def __init__(self, vocabulary: int, pad: int, embed_dim: int, out_dim: int, units: int) -> None:
        super().__init__(vocabulary, pad, embed_dim, out_dim)
        self.lstm = LSTM(embed_dim, 0, units)

    def units(self, tokens_UL: Tensor) -> Tensor:
        # Finished hypotheses have padding anywhere: all up to the last real token is read, and at least one.
        inside_UL = (tokens_UL != self.pad).int().flip(1).cummax(dim=1).values.flip(1).bool()
        inside_UL[:, 0] = True
        chunk_P, place_P = inside_UL.nonzero().unbind(1)
        total = chunk_P.numel()
        slot_P = torch.arange(total, device=chunk_P.device)
        hidden_PU = self.lstm(self.embed.weight, None, Steps(tokens_UL[inside_UL], chunk_P, place_P, slot_P, total))
        return hidden_PU.index_select(0, inside_UL.sum(dim=1).cumsum(0) - 1)


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
    """An integer (M,) for each chunk, equal for equal ones, and in lexicographic order.

    Tokens are the digits of an integer; where not all of a chunk's fit into 63 bits, the codes of its parts are
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
