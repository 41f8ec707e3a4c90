"""Main models: from the encodings of the chunks so far to what is known about the next chunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_ms.core.hierarchical.segmentation import ChunkTable
from fairseq_ms.core.layers import LayerConfig, TransformerStack
from fairseq_ms.core.ops.lstm import LSTM, Steps
from fairseq_ms.core.ops.recompute import Dropout


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

    def embed(self, e_ME: Tensor, index_M: Tensor) -> Tensor:
        """Encodings (M, E) of the chunks at these places of their sequences, to (M, E + position_dim)."""
        if self.positions is not None:
            # Beside the encoding, not added to it: HAED, Appendix A, Table 2.
            e_ME = torch.cat([e_ME, self.positions(index_M).to(e_ME.dtype)], dim=1)
        return self.drop(e_ME)


class TransformerMain(MainModel):
    """A causal transformer over chunks (HAED, Section 3.1, equation 2, and Table 2).

    Args:
        config: its layers; their dimension D is the encoder's width plus that of the positions.
        layers: how many.
        positions, position_dim: as for ``MainModel``.
    """

    def __init__(self, config: LayerConfig, layers: int, positions: int, position_dim: int) -> None:
        super().__init__(positions, position_dim, config.dropout, config.recompute)
        self.heads, self.head_dim = config.heads, config.width_of_head
        self.stack = TransformerStack(config, layers)

    def forward(self, e_ME: Tensor, chunks: ChunkTable) -> Tensor:
        """Encodings (M, E) of all chunks to outputs (M, D)."""
        x_BCD = chunks.to_rows(self.embed(e_ME, chunks.index_M()))
        return chunks.from_rows(self.stack(x_BCD))


class LSTMMain(MainModel):
    """An LSTM over chunks with its input gate capped at 1 - forget gate, projected to D (HAED, Appendix A).

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

    def forward(self, e_ME: Tensor, chunks: ChunkTable) -> Tensor:
        """Encodings (M, E) of all chunks to outputs (M, D)."""
        hidden_MU = self.lstm(self.embed(e_ME, chunks.index_M()), None, self.steps(chunks))
        return self.out(self.drop(hidden_MU))

    def steps(self, chunks: ChunkTable) -> Steps:
        """What the LSTM reads: the chunks of a row, one after the other."""
        index_M = chunks.index_M()
        chunk_M = torch.arange(index_M.numel(), device=index_M.device)
        return Steps(chunk_M, chunks.row_M(), index_M, chunk_M, index_M.numel())
