"""Cached decoding of the hierarchical models: what each of their parts remembers, and when a row begins a new chunk."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fairseq_ms.core.hierarchical.chunk_decoder import LSTMDecoder, TransformerDecoder
from fairseq_ms.core.hierarchical.chunk_encoder import ChunkEncoder
from fairseq_ms.core.hierarchical.chunk_main import LSTMMain, TransformerMain
from fairseq_ms.core.hierarchical.rows import RowCaches
from fairseq_ms.core.hierarchical.segmentation import ChunkTable, Segmentation
from fairseq_ms.core.ops.lstm import LSTMState
from fairseq_ms.decoding.state import DecodingState


class MainState(Protocol):
    """A main model at work on a batch whose rows may have read different numbers of chunks."""

    def prefill(self, e_ME: Tensor, chunks: ChunkTable) -> Tensor:
        """Read all chunks of every row at once: encodings (M, E) to main outputs (M, D)."""

    def step(self, e_RE: Tensor, rows_R: Tensor) -> Tensor:
        """Read one more chunk of some rows: (R, E) to (R, D)."""

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""


class TransformerMainState:
    """The keys and values of a ``TransformerMain``."""

    def __init__(self, main: TransformerMain, rows: int, chunks: int, like: Tensor) -> None:
        self.main = main
        self.caches = RowCaches(len(main.stack.layers), rows, main.heads, main.head_dim, chunks, like)

    def prefill(self, e_ME: Tensor, chunks: ChunkTable) -> Tensor:
        x_BCD = chunks.to_rows(self.main.embed(e_ME, chunks.index_M()))
        self.caches.reserve(x_BCD.shape[1])
        x_BCD = self.main.stack(x_BCD, self.caches.fill())
        self.caches.lengths_B = chunks.counts_B.clone()
        return chunks.from_rows(x_BCD)

    def step(self, e_RE: Tensor, rows_R: Tensor) -> Tensor:
        every = rows_R.numel() == self.caches.lengths_B.numel()
        x_R1D = self.main.embed(e_RE, self.caches.lengths_B[rows_R]).unsqueeze(1)
        return self.main.stack(x_R1D, self.caches.one_more(None if every else rows_R)).squeeze(1)

    def reorder(self, order: Tensor) -> None:
        self.caches.reorder(order)


class LSTMMainState:
    """The LSTM's state in an ``LSTMMain``, and how many chunks each row has read."""

    def __init__(self, main: LSTMMain, rows: int, like: Tensor) -> None:
        self.main = main
        self.inner = main.lstm.new_state(rows, like)
        self.chunks_B = torch.zeros(rows, dtype=torch.long, device=like.device)

    def prefill(self, e_ME: Tensor, chunks: ChunkTable) -> Tensor:
        x_MD = self.main.embed(e_ME, chunks.index_M())
        hidden_MU, cell_BU = self.main.lstm.with_last_cells(x_MD, None, self.main.steps(chunks))
        self.inner = LSTMState(hidden_MU.index_select(0, chunks.last_B()), cell_BU)
        self.chunks_B = chunks.counts_B.clone()
        return self.main.out(hidden_MU)

    def step(self, e_RE: Tensor, rows_R: Tensor) -> Tensor:
        gates_R4U = self.main.lstm.project_table(self.main.embed(e_RE, self.chunks_B[rows_R]))
        some = LSTMState(self.inner.hidden_BU[rows_R], self.inner.cell_BU[rows_R])
        hidden_RU = self.main.lstm.step(gates_R4U, some)
        self.inner.hidden_BU = self.inner.hidden_BU.index_copy(0, rows_R, hidden_RU)
        self.inner.cell_BU = self.inner.cell_BU.index_copy(0, rows_R, some.cell_BU)
        self.chunks_B = self.chunks_B.index_add(0, rows_R, torch.ones_like(rows_R))
        return self.main.out(hidden_RU)

    def reorder(self, order: Tensor) -> None:
        self.inner.reorder(order)
        self.chunks_B = self.chunks_B.index_select(0, order)


class ChunkDecoderState(Protocol):
    """A chunk decoder at work on a batch, each row at a place of its own within its chunk."""

    def prefill(self, tokens_BT: Tensor, main_MD: Tensor, chunks: ChunkTable) -> Tensor:
        """All tokens of every row at once: features (B, T, U)."""

    def begin(self, rows_R: Tensor, main_RD: Tensor) -> None:
        """Let some rows begin a new chunk; it comes before the first ``step``."""

    def step(self, token_B: Tensor) -> Tensor:
        """One token of every row: features (B, U)."""

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""


class LSTMDecoderState:
    """The LSTM's state in an ``LSTMDecoder``, and what each main output contributes, projected once a chunk.

    The projected embedding of every symbol is kept as well: weights do not change while decoding.
    """

    def __init__(self, decoder: LSTMDecoder, rows: int, like: Tensor) -> None:
        self.decoder, self.lstm = decoder, decoder.lstm
        self.table_VG = decoder.lstm.project_table(decoder.embed.weight)
        self.context_BG = self.table_VG.new_zeros(rows, self.table_VG.shape[1])
        self.inner = decoder.lstm.new_state(rows, like)

    def prefill(self, tokens_BT: Tensor, main_MD: Tensor, chunks: ChunkTable) -> Tensor:
        steps = self.decoder.steps(tokens_BT, chunks)
        hidden_FU, cell_MU = self.lstm.with_last_cells(self.decoder.embed.weight, main_MD, steps)
        hidden_BTU = hidden_FU.view(*tokens_BT.shape, -1)
        last_B = chunks.last_B()
        self.context_BG = self.lstm.project_context(main_MD.index_select(0, last_B))
        self.inner = LSTMState(hidden_BTU[:, -1], cell_MU.index_select(0, last_B))
        return hidden_BTU

    def begin(self, rows_R: Tensor, main_RD: Tensor) -> None:
        self.context_BG = self.context_BG.index_copy(0, rows_R, self.lstm.project_context(main_RD))
        self.inner.hidden_BU = self.inner.hidden_BU.index_fill(0, rows_R, 0.0)
        self.inner.cell_BU = self.inner.cell_BU.index_fill(0, rows_R, 0.0)

    def step(self, token_B: Tensor) -> Tensor:
        return self.lstm.step(self.context_BG + self.table_VG.index_select(0, token_B), self.inner)

    def reorder(self, order: Tensor) -> None:
        self.context_BG = self.context_BG.index_select(0, order)
        self.inner.reorder(order)


class TransformerDecoderState:
    """The keys and values of a ``TransformerDecoder``, and projections as in ``LSTMDecoderState``."""

    def __init__(self, decoder: TransformerDecoder, rows: int, like: Tensor) -> None:
        self.decoder = decoder
        self.table_VG = decoder.project_token(decoder.embed.weight)
        self.context_BG = self.table_VG.new_zeros(rows, self.table_VG.shape[1])
        layers = len(decoder.stack.layers)
        self.caches = RowCaches(layers, rows, decoder.heads, decoder.head_dim, decoder.length, like)

    def prefill(self, tokens_BT: Tensor, main_MD: Tensor, chunks: ChunkTable) -> Tensor:
        """The packed pass has no caches: the tokens of the unfinished chunks are run over once more, as a rectangle."""
        self.context_BG = self.decoder.project_context(main_MD.index_select(0, chunks.last_B()))
        lengths_B = chunks.place_P.view(tokens_BT.shape)[:, -1] + 1
        place_L = torch.arange(int(lengths_B.max()), device=tokens_BT.device)
        tokens_BL = last_tokens(tokens_BT, lengths_B, place_L)
        x_BLG = self.table_VG[tokens_BL] + self.context_BG.unsqueeze(1) + self.decoder.places(place_L)
        self.decoder.stack(x_BLG, self.caches.fill())
        self.caches.lengths_B = lengths_B
        return self.decoder(tokens_BT, main_MD, chunks)

    def begin(self, rows_R: Tensor, main_RD: Tensor) -> None:
        self.context_BG = self.context_BG.index_copy(0, rows_R, self.decoder.project_context(main_RD))
        self.caches.lengths_B = self.caches.lengths_B.index_fill(0, rows_R, 0)

    def step(self, token_B: Tensor) -> Tensor:
        places_BG = self.decoder.places(self.caches.lengths_B)
        x_BG = self.context_BG + self.table_VG.index_select(0, token_B) + places_BG
        return self.decoder.stack(x_BG.unsqueeze(1), self.caches.one_more(None)).squeeze(1)

    def reorder(self, order: Tensor) -> None:
        self.context_BG = self.context_BG.index_select(0, order)
        self.caches.reorder(order)


class HierarchicalState(DecodingState):
    """Where every row is: in which chunk, at which place of it, and what main model and chunk decoder remember.

    Args:
        segmentation, encoder, main, chunk_decoder: the model's
        batch_size: B
        capacity: tokens to make room for

    Attributes:
        place_B: how many tokens the chunk behind the last finished one has so far; -1 before the first token of all.
        chunk_BL: these tokens, padded.
    """

    def __init__(
        self,
        segmentation: Segmentation,
        encoder: ChunkEncoder,
        main: TransformerMain | LSTMMain,
        chunk_decoder: LSTMDecoder | TransformerDecoder,
        batch_size: int,
        capacity: int,
    ) -> None:
        self.segmentation, self.encoder = segmentation, encoder
        like, length = next(main.parameters()), segmentation.max_length
        self.length = 0
        self.main: MainState
        if isinstance(main, TransformerMain):
            # A word has about five characters; the caches of a row with more chunks than that grow.
            chunks = 1 + capacity // (length if segmentation.kind == "fixed" else min(length, 4))
            self.main = TransformerMainState(main, batch_size, chunks, like)
        else:
            self.main = LSTMMainState(main, batch_size, like)
        self.chunk_decoder: ChunkDecoderState
        if isinstance(chunk_decoder, LSTMDecoder):
            self.chunk_decoder = LSTMDecoderState(chunk_decoder, batch_size, like)
        else:
            self.chunk_decoder = TransformerDecoderState(chunk_decoder, batch_size, like)
        self.chunk_BL = torch.full((batch_size, length), segmentation.pad, device=like.device)
        self.place_B = torch.full_like(self.chunk_BL[:, 0], -1)

    def reorder(self, order: Tensor) -> None:
        self.main.reorder(order)
        self.chunk_decoder.reorder(order)
        self.chunk_BL = self.chunk_BL.index_select(0, order)
        self.place_B = self.place_B.index_select(0, order)

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        # Hypotheses that have finished go on with anything, the padding symbol included; here, it is a token.
        chunks = self.segmentation(tokens_BT, padded=False)
        main_MD = self.main.prefill(self.encoder(chunks.tokens_ML), chunks)
        x_BTU = self.chunk_decoder.prefill(tokens_BT, main_MD, chunks)
        self.length = tokens_BT.shape[1]
        self.place_B = chunks.place_P.view(tokens_BT.shape)[:, -1]
        place_L = torch.arange(self.chunk_BL.shape[1], device=tokens_BT.device)
        chunk_BL = last_tokens(tokens_BT, self.place_B, place_L)
        self.chunk_BL = torch.where(place_L < self.place_B.unsqueeze(1), chunk_BL, self.segmentation.pad)
        return x_BTU

    def step(self, tokens_B1: Tensor) -> Tensor:
        """Rows may begin a new chunk at different steps."""
        token_B = tokens_B1[:, 0]
        self.chunk_BL = self.chunk_BL.scatter(1, self.place_B.clamp(min=0).unsqueeze(1), tokens_B1)
        ends_B, self.place_B = self.segmentation.advance(self.place_B, token_B)
        rows_R = ends_B.nonzero().squeeze(1)
        if rows_R.numel():
            main_RD = self.main.step(self.encoder.encode(self.chunk_BL[rows_R]), rows_R)
            self.chunk_decoder.begin(rows_R, main_RD)
            self.chunk_BL = self.chunk_BL.index_fill(0, rows_R, self.segmentation.pad)
        self.length += 1
        return self.chunk_decoder.step(token_B).unsqueeze(1)


def last_tokens(tokens_BT: Tensor, lengths_B: Tensor, place_L: Tensor) -> Tensor:
    """The last ``lengths_B`` tokens of every row, at the left of (B, L); what is behind them means nothing."""
    column_BL = tokens_BT.shape[1] - lengths_B.unsqueeze(1) + place_L
    return tokens_BT.gather(1, column_BL.clamp(max=tokens_BT.shape[1] - 1))
