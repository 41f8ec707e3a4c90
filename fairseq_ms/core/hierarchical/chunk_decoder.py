"""Chunk decoders: predict one chunk token by token, from the main output before it and nothing of other chunks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_ms.core.hierarchical.packed import SequencePacking, packed_stack
from fairseq_ms.core.hierarchical.segmentation import ChunkTable
from fairseq_ms.core.layers import LayerConfig, TransformerStack
from fairseq_ms.core.ops.linear import Linear
from fairseq_ms.core.ops.lstm import LSTM, Steps
from fairseq_ms.core.ops.recompute import Dropout


class LSTMDecoder(nn.Module):
    """An LSTM over the tokens of a chunk, each next to the main output (HAED, Section 3.1, equation 3).

    Args:
        vocabulary: number of symbols V.
        pad: index of the padding symbol.
        embed_dim: width of a token's embedding.
        main_dim: width D of the main outputs.
        units: hidden units U.
        dropout: probability, on the hidden states that go to the output layer.
        recompute: keep the dropout mask as a seed.
    """

    def __init__(
        self, vocabulary: int, pad: int, embed_dim: int, main_dim: int, units: int, dropout: float, recompute: bool
    ) -> None:
        super().__init__()
        self.drop = Dropout(dropout, recompute)
        self.embed = nn.Embedding(vocabulary, embed_dim, padding_idx=pad)
        self.lstm = LSTM(embed_dim, main_dim, units)
        self.out_dim = units

    def forward(self, tokens_BT: Tensor, main_MD: Tensor, chunks: ChunkTable) -> Tensor:
        """(B, T) tokens and the main output before each of M chunks to (B, T, U), zero at padding."""
        hidden_FU = self.lstm(self.embed.weight, main_MD, self.steps(tokens_BT, chunks))
        return self.drop(hidden_FU.view(*tokens_BT.shape, -1))

    def steps(self, tokens_BT: Tensor, chunks: ChunkTable) -> Steps:
        """What the LSTM reads: the tokens of a chunk, one after the other."""
        symbol_P = tokens_BT.flatten().index_select(0, chunks.position_P)
        return Steps(symbol_P, chunks.decoded_P, chunks.place_P, chunks.position_P, tokens_BT.numel())


class TransformerDecoder(nn.Module):
    """A small causal transformer over the tokens of a chunk, whose main output is added to each of its inputs.

    Under a transformer main, this is the shape of MEGABYTE (Yu et al., 2023). Chunks of equal length are one rectangle
    for attention, and everything else runs over all tokens of the batch as one list: nothing is computed for padding.

    Args:
        vocabulary, pad, embed_dim, main_dim: as for ``LSTMDecoder``.
        config: the layers, of dimension U.
        layers: how many.
        length: the greatest number of tokens in a chunk.
    """

    def __init__(
        self, vocabulary: int, pad: int, embed_dim: int, main_dim: int, config: LayerConfig, layers: int, length: int
    ) -> None:
        super().__init__()
        self.drop = Dropout(config.dropout, config.recompute)
        self.heads, self.head_dim, self.length = config.heads, config.width_of_head, length
        self.embed = nn.Embedding(vocabulary, embed_dim, padding_idx=pad)
        self.places = nn.Embedding(length, config.dim)
        self.project_token = Linear(embed_dim, config.dim)
        self.project_context = Linear(main_dim, config.dim, bias=False)
        self.stack = TransformerStack(config, layers)
        self.out_dim = config.dim

    def forward(self, tokens_BT: Tensor, main_MD: Tensor, chunks: ChunkTable) -> Tensor:
        """(B, T) tokens and the main output before each of M chunks to (B, T, U), zero at padding."""
        packing = SequencePacking.of(torch.bincount(chunks.decoded_P))
        packed_P = packing.start_M[chunks.decoded_P] + chunks.place_P
        # From reading order to the packed one.
        read_P = torch.empty_like(packed_P)
        read_P[packed_P] = torch.arange(packed_P.numel(), device=packed_P.device)
        slot_P = chunks.position_P[read_P]
        table_VG, context_MG = self.project_token(self.embed.weight), self.project_context(main_MD)
        x_PG = table_VG.index_select(0, tokens_BT.flatten().index_select(0, slot_P))
        x_PG = x_PG + context_MG.index_select(0, chunks.decoded_P[read_P]) + self.places(chunks.place_P[read_P])
        x_PG = packed_stack(self.stack, self.drop(x_PG), packing.rectangles)
        x_FG = x_PG.new_zeros(tokens_BT.numel(), x_PG.shape[1]).index_copy(0, slot_P, x_PG)
        return x_FG.view(*tokens_BT.shape, -1)
