"""Decoders: spell one chunk token by token, given what the main model says about it and nothing of other chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.hierarchical.chunks import ChunkTable, Packing
from fairseq_ms.modules.hierarchical.packed import packed_stack
from fairseq_ms.modules.hierarchical.rows import RowCaches
from fairseq_ms.modules.transformer import TransformerStack
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.lstm import LSTM, LSTMState
from fairseq_ms.ops.recompute import Dropout


@dataclass
class SpellingState:
    """Where every row is within its chunk.

    Attributes:
        context_BG: what the main output contributes to every step, projected once a chunk.
        table_VG: the projected embedding of every symbol: weights do not change while decoding.
        inner: the decoder's own state.
    """

    context_BG: Tensor
    table_VG: Tensor
    inner: LSTMState | RowCaches

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.context_BG = self.context_BG.index_select(0, order)
        self.inner.reorder(order)


class LSTMDecoder(nn.Module):
    """An LSTM over the tokens of a chunk, each next to the main output (Hierarchical Attention Encoder Decoder, 3.1).

    Args:
        vocabulary: number of symbols V.
        pad: index of the padding symbol.
        embed_dim: width of a token's embedding.
        main_dim: width D of the main outputs.
        units: hidden units U.
        dropout: probability, on the hidden states that go to the output layer.
    """

    def __init__(
        self, vocabulary: int, pad: int, embed_dim: int, main_dim: int, units: int, dropout: float, recompute: bool
    ) -> None:
        super().__init__()
        self.drop = Dropout(dropout, recompute)
        self.embed = nn.Embedding(vocabulary, embed_dim, padding_idx=pad)
        self.lstm = LSTM(embed_dim, main_dim, units)
        self.out_dim = units

    def forward(
        self, tokens_BT: Tensor, main_MD: Tensor, chunks: ChunkTable, state: SpellingState | None = None
    ) -> Tensor:
        """(B, T) tokens and the main output behind each of M chunks to (B, T, U), zero at padding.

        A fresh state is left as after each row's last token.
        """
        packing = Packing.of(chunks.decode_lengths())
        packed_P = packing.step_major(chunks.decoded_P, chunks.place_P)
        slot_P = torch.empty_like(packed_P).index_copy_(0, packed_P, chunks.position_P)
        symbol_P = tokens_BT.flatten().index_select(0, slot_P)
        rows, steps = tokens_BT.shape
        hidden_FU, cell_PU = self.lstm(self.embed.weight, symbol_P, main_MD, packing, slot_P, rows * steps)
        hidden_BTU = hidden_FU.view(rows, steps, -1)
        if state is not None:
            assert isinstance(state.inner, LSTMState)
            assert packed_P.numel() == rows * steps
            state.context_BG = self.lstm.project_context(main_MD[chunks.counts_B.cumsum(0) - 1])
            state.inner.hidden_BU = hidden_BTU[:, -1]
            state.inner.cell_BU = cell_PU.index_select(0, packed_P.view(rows, steps)[:, -1])
        return self.drop(hidden_BTU)

    def new_state(self, rows: int, like: Tensor) -> SpellingState:
        """The state before the first token; ``begin`` comes before the first ``step``."""
        table_VG = self.lstm.project_table(self.embed.weight)
        return SpellingState(table_VG.new_zeros(rows, table_VG.shape[1]), table_VG, self.lstm.new_state(rows, like))

    def begin(self, rows_R: Tensor, main_RD: Tensor, state: SpellingState) -> None:
        """Let some rows begin a new chunk."""
        assert isinstance(state.inner, LSTMState)
        state.context_BG = state.context_BG.index_copy(0, rows_R, self.lstm.project_context(main_RD))
        state.inner.hidden_BU = state.inner.hidden_BU.index_fill(0, rows_R, 0.0)
        state.inner.cell_BU = state.inner.cell_BU.index_fill(0, rows_R, 0.0)

    def step(self, token_B: Tensor, state: SpellingState) -> Tensor:
        """One token of every row, (B,) to (B, U)."""
        assert isinstance(state.inner, LSTMState)
        return self.lstm.step(state.context_BG + state.table_VG.index_select(0, token_B), state.inner)


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

    def forward(
        self, tokens_BT: Tensor, main_MD: Tensor, chunks: ChunkTable, state: SpellingState | None = None
    ) -> Tensor:
        """(B, T) tokens and the main output behind each of M chunks to (B, T, U), zero at padding.

        A fresh state is left as after each row's last token.
        """
        rows, steps = tokens_BT.shape
        lengths_M = chunks.decode_lengths()
        packing = Packing.of(lengths_M)
        packed_P = packing.sequence_major(chunks.decoded_P, chunks.place_P)
        slot_P = torch.empty_like(packed_P).index_copy_(0, packed_P, chunks.position_P)
        place_P = torch.empty_like(packed_P).index_copy_(0, packed_P, chunks.place_P)
        table_VG, context_MG = self.project_token(self.embed.weight), self.project_context(main_MD)
        chunk_P = torch.repeat_interleave(packing.order_M, lengths_M[packing.order_M])
        x_PG = table_VG.index_select(0, tokens_BT.flatten().index_select(0, slot_P))
        x_PG = x_PG + context_MG.index_select(0, chunk_P) + self.places(place_P)
        x_PG = packed_stack(self.stack, self.drop(x_PG), packing.rectangles())
        if state is not None:
            assert packed_P.numel() == rows * steps
            last_B = chunks.counts_B.cumsum(0) - 1
            state.context_BG = context_MG.index_select(0, last_B)
            self._fill(tokens_BT, lengths_M[last_B], state)
        x_FG = x_PG.new_zeros(rows * steps, x_PG.shape[1]).index_copy(0, slot_P, x_PG)
        return x_FG.view(rows, steps, -1)

    def new_state(self, rows: int, like: Tensor) -> SpellingState:
        """The state before the first token; ``begin`` comes before the first ``step``."""
        table_VG = self.project_token(self.embed.weight)
        caches = RowCaches(len(self.stack.layers), rows, self.heads, self.head_dim, self.length, like)
        return SpellingState(table_VG.new_zeros(rows, table_VG.shape[1]), table_VG, caches)

    def begin(self, rows_R: Tensor, main_RD: Tensor, state: SpellingState) -> None:
        """Let some rows begin a new chunk."""
        assert isinstance(state.inner, RowCaches)
        state.context_BG = state.context_BG.index_copy(0, rows_R, self.project_context(main_RD))
        state.inner.lengths_B = state.inner.lengths_B.index_fill(0, rows_R, 0)

    def step(self, token_B: Tensor, state: SpellingState) -> Tensor:
        """One token of every row, (B,) to (B, U)."""
        assert isinstance(state.inner, RowCaches)
        x_BG = state.context_BG + state.table_VG.index_select(0, token_B) + self.places(state.inner.lengths_B)
        return self.stack(x_BG.unsqueeze(1), state.inner.one_more(None)).squeeze(1)

    def _fill(self, tokens_BT: Tensor, lengths_B: Tensor, state: SpellingState) -> None:
        """Leave the caches as after the last ``lengths_B`` tokens of every row, the chunk that it is spelling.

        The packed pass has no caches, so these few tokens are run over once more, as a rectangle padded on the right.
        """
        assert isinstance(state.inner, RowCaches)
        longest = int(lengths_B.max())
        place_L = torch.arange(longest, device=tokens_BT.device)
        column_BL = tokens_BT.shape[1] - lengths_B.unsqueeze(1) + place_L
        tokens_BL = tokens_BT.gather(1, column_BL.clamp(max=tokens_BT.shape[1] - 1))
        x_BLG = state.table_VG[tokens_BL] + state.context_BG.unsqueeze(1) + self.places(place_L)
        self.stack(x_BLG, state.inner.fill())
        state.inner.lengths_B = lengths_B
