"""Main models: from the encodings of the chunks so far to what is known about the next chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.hierarchical.chunks import ChunkTable, Packing
from fairseq_ms.modules.hierarchical.rows import RowCaches
from fairseq_ms.modules.transformer import TransformerStack
from fairseq_ms.ops.lstm import LSTM, LSTMState
from fairseq_ms.ops.recompute import Dropout


class MainModel(nn.Module):
    """What main models share: they read an encoding with its position, after dropout.

    Args:
        positions: how many chunks a sequence can have.
        position_dim: width of the learned position embedding, 0 for none.
        dropout: probability.
        recompute: keep the dropout mask as a seed.
    """

    def __init__(self, positions: int, position_dim: int, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.drop = Dropout(dropout, recompute)
        self.positions = nn.Embedding(positions, position_dim) if position_dim else None
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)

    def embed(self, x_ME: Tensor, number_M: Tensor) -> Tensor:
        """Encodings (M, E) of chunks with these numbers within their sequences, to (M, E + position_dim)."""
        if self.positions is not None:
            # Beside the encoding, not added to it: Appendix A, Table 2.
            x_ME = torch.cat([x_ME, self.positions(number_M).to(x_ME.dtype)], dim=1)
        return self.drop(x_ME)


class TransformerMain(MainModel):
    """A causal transformer over chunks (Hierarchical Attention Encoder Decoder, Table 2).

    Args:
        config: its layers; their dimension D is the encoder's width plus that of the positions.
        layers: how many.
        positions, position_dim: as for ``MainModel``.
    """

    def __init__(self, config: LayerConfig, layers: int, positions: int, position_dim: int) -> None:
        super().__init__(positions, position_dim, config.dropout, config.recompute)
        self.heads, self.head_dim = config.heads, config.width_of_head
        self.stack = TransformerStack(config, layers)

    def new_state(self, rows: int, capacity: int, like: Tensor) -> RowCaches:
        """The state before the first chunk."""
        return RowCaches(len(self.stack.layers), rows, self.heads, self.head_dim, capacity, like)

    def forward(self, x_ME: Tensor, chunks: ChunkTable, state: RowCaches | None = None) -> Tensor:
        """Encodings (M, E) of all chunks to outputs (M, D); a fresh state is left as after each row's last chunk."""
        x_BCD = chunks.to_rows(self.embed(x_ME, chunks.number_M()))
        caches = None
        if state is not None:
            state.reserve(x_BCD.shape[1])
            caches = state.fill()
            state.lengths_B = chunks.counts_B.clone()
        return chunks.from_rows(self.stack(x_BCD, caches))

    def step(self, x_RE: Tensor, rows_R: Tensor | None, state: RowCaches | RecurrentState) -> Tensor:
        """One more chunk of the rows ``rows_R`` (of all, if None): (R, E) to (R, D)."""
        assert isinstance(state, RowCaches)
        start_R = state.lengths_B if rows_R is None else state.lengths_B[rows_R]
        x_R1D = self.embed(x_RE, start_R).unsqueeze(1)
        return self.stack(x_R1D, state.one_more(rows_R)).squeeze(1)


@dataclass
class RecurrentState:
    """An LSTM's state and how many chunks each row has read."""

    inner: LSTMState
    chunks_B: Tensor

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.inner.reorder(order)
        self.chunks_B = self.chunks_B.index_select(0, order)


class LSTMMain(MainModel):
    """An LSTM over chunks with its input gate capped at 1 - forget gate, projected to D (Appendix A).

    Args:
        dim: width of its inputs, and of its outputs: the decoder is then as large as under a transformer.
        units: hidden units.
        positions, position_dim, dropout, recompute: as for ``MainModel``; dropout is also on the hidden states.
    """

    def __init__(
        self, dim: int, units: int, positions: int, position_dim: int, dropout: float, recompute: bool
    ) -> None:
        super().__init__(positions, position_dim, dropout, recompute)
        self.lstm = LSTM(dim, 0, units, capped=True)
        self.out = nn.Linear(units, dim)

    def new_state(self, rows: int, capacity: int, like: Tensor) -> RecurrentState:
        """The state before the first chunk; a recurrent one needs no room."""
        return RecurrentState(self.lstm.new_state(rows, like), torch.zeros(rows, dtype=torch.long, device=like.device))

    def forward(self, x_ME: Tensor, chunks: ChunkTable, state: RecurrentState | None = None) -> Tensor:
        """Encodings (M, E) of all chunks to outputs (M, D); a fresh state is left as after each row's last chunk."""
        counts_B, number_M = chunks.counts_B, chunks.number_M()
        x_MD, total = self.embed(x_ME, number_M), x_ME.shape[0]
        packing = Packing.of(counts_B)
        row_M = torch.repeat_interleave(torch.arange(counts_B.numel(), device=x_ME.device), counts_B)
        packed_M = packing.step_major(row_M, number_M)
        chunk_P = torch.empty_like(packed_M).index_copy_(0, packed_M, torch.arange(total, device=x_ME.device))
        hidden_MU, cell_PU = self.lstm(x_MD, chunk_P, None, packing, chunk_P, total)
        if state is not None:
            last_B = counts_B.cumsum(0) - 1
            state.inner.hidden_BU = hidden_MU.index_select(0, last_B)
            state.chunks_B = counts_B.clone()
            state.inner.cell_BU = cell_PU.index_select(0, packed_M[last_B])
        return self.out(self.drop(hidden_MU))  # type: ignore[no-any-return]

    def step(self, x_RE: Tensor, rows_R: Tensor | None, state: RowCaches | RecurrentState) -> Tensor:
        """One more chunk of the rows ``rows_R`` (of all, if None): (R, E) to (R, D)."""
        assert isinstance(state, RecurrentState)
        if rows_R is None:
            rows_R = torch.arange(x_RE.shape[0], device=x_RE.device)
        gates_R4U = self.lstm.project_table(self.embed(x_RE, state.chunks_B[rows_R]))
        some = LSTMState(state.inner.hidden_BU[rows_R], state.inner.cell_BU[rows_R])
        hidden_RU = self.lstm.step(gates_R4U, some)
        state.inner.hidden_BU = state.inner.hidden_BU.index_copy(0, rows_R, hidden_RU)
        state.inner.cell_BU = state.inner.cell_BU.index_copy(0, rows_R, some.cell_BU)
        state.chunks_B = state.chunks_B.index_add(0, rows_R, torch.ones_like(rows_R))
        return self.out(hidden_RU)  # type: ignore[no-any-return]
