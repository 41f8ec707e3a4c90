"""Encoders: from the tokens of one chunk, without any context, to one vector."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.modules.hierarchical.chunks import Packing, unique_chunks
from fairseq_ms.ops.lstm import LSTM


class ChunkEncoder(nn.Module, ABC):
    """Encode chunks of up to L tokens into D numbers each (Hierarchical Attention Encoder Decoder, 3.1, Appendix A).

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
        return self.second(self.first(x_UE).relu()).relu()  # type: ignore[no-any-return]


class LSTMEncoder(ChunkEncoder):
    """The hidden state of an LSTM after the last token of the chunk."""

    def __init__(self, vocabulary: int, pad: int, embed_dim: int, out_dim: int, units: int) -> None:
        super().__init__(vocabulary, pad, embed_dim, out_dim)
        self.lstm = LSTM(embed_dim, 0, units)

    def units(self, tokens_UL: Tensor) -> Tensor:
        # Finished hypotheses have padding anywhere: all up to the last real token is read, and at least one.
        inside_UL = (tokens_UL != self.pad).int().flip(1).cummax(dim=1).values.flip(1).bool()
        inside_UL[:, 0] = True
        lengths_U = inside_UL.sum(dim=1)
        packing = Packing.of(lengths_U)
        sequence_P, step_P = inside_UL.nonzero().unbind(1)
        packed_P = packing.step_major(sequence_P, step_P)
        symbol_P = torch.empty_like(packed_P).index_copy_(0, packed_P, tokens_UL[inside_UL])
        slot_P = torch.arange(packed_P.numel(), device=packed_P.device)
        hidden_PU, _ = self.lstm(self.embed.weight, symbol_P, None, packing, slot_P, packed_P.numel())
        last_U = packing.step_major(torch.arange(lengths_U.numel(), device=packed_P.device), lengths_U - 1)
        return hidden_PU.index_select(0, last_U)
