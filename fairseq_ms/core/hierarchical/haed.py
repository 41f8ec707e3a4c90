"""HAED and HRED: encode chunks, model the sequence of chunks, decode each chunk by itself.

    tokens      </s> | t h e _ | c a t _ | s a t _ ...      chunk 0 is the first token, whatever it is
    encoder       e0      e1        e2                      equation 1
    main          m0      m1        m2                      equation 2: m(c) has read the chunks 0 .. c
    decoder      the_    cat_      sat_                     equation 3: m(c) helps to predict chunk c + 1

Where a chunk ends depends on its tokens alone, so this is an ordinary autoregressive language model over the tokens,
whose probabilities sum to 1 (HAED, Section 3.1). The decoder reads the token before the one it predicts, at a chunk's
beginning the last token of the chunk before.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor, nn

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.hierarchical.caches import ChunkCaches, HAEDState, Rectangles, RowCache, RowCaches
from fairseq_ms.core.hierarchical.chunks import (
    ChunkEncoder,
    ChunkTable,
    LSTMEncoder,
    MLPEncoder,
    Segmentation,
    Unfinished,
)
from fairseq_ms.core.hierarchical.config import HAEDConfig, HREDConfig
from fairseq_ms.core.layers import TransformerStack
from fairseq_ms.core.model import CausalModel, start_residuals
from fairseq_ms.core.ops.linear import ShortConv, projection, table
from fairseq_ms.core.ops.lstm import LSTM, LSTMState, RaggedSteps
from fairseq_ms.core.ops.recompute import Dropout


class MainModel(nn.Module):
    """What main models share: encodings with position embeddings and dropout."""

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__()
        self.drop = Dropout(config.dropout, config.recompute)
        dim = config.width_of_positions
        self.positions = nn.Embedding(config.chunks_of(config.max_positions), dim) if dim else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the position embedding."""
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)

    def embed(self, e_WE: Tensor, index_W: Tensor) -> Tensor:
        """Encodings (W, E) of chunks at these places of their rows -> (W, E + position_dim)."""
        if self.positions is not None:
            # Concatenated, not added (HAED, Appendix A, Table 2).
            e_WE = torch.cat([e_WE, self.positions(index_W).to(e_WE.dtype)], dim=1)
        return self.drop(e_WE)


class TransformerMain(MainModel):
    """A causal transformer over chunks (HAED, Section 3.1, equation 2, and Table 2)."""

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__(config)
        self.config = config
        self.stack = TransformerStack(config, config.layers)

    def forward(self, e_WE: Tensor, chunks: ChunkTable, past: RowCaches | None = None) -> Tensor:
        """Encodings (W, E) of all chunks -> outputs (W, D)."""
        x_RCD = chunks.to_rows(self.embed(e_WE, chunks.index_W))
        rotation_2RCF = None
        if self.config.positions == "rotary":
            places_RC = chunks.to_rows(chunks.index_W.double().unsqueeze(1)).squeeze(2)
            rotation_2RCF = self.config.rotation(places_RC, x_RCD)
        pasts = None if past is None else past.extend(chunks.row_R, chunks.counts_R, x_RCD.size(1))
        return chunks.from_rows(self.stack(x_RCD, pasts, rotation_2RCF))

    def new_state(self, rows: int, chunks: int, device: torch.device | None = None) -> RowCaches:
        """An empty state of so many rows, with room for ``chunks``."""
        return RowCaches(self.stack, rows, chunks, next(self.stack.parameters()).new_empty(0, device=device))


class LSTMMain(MainModel):
    """An LSTM over chunks whose input gate is at most 1 - forget gate, with dropout, projected to D (HAED, Appendix A).

    Inputs have width D as well, so that the decoder is as large as with a transformer main.
    """

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__(config)
        self.lstm = LSTM(config.dim, 0, config.main_units, capped=True)
        self.out = nn.Linear(config.main_units, config.dim)

    def forward(self, e_WE: Tensor, chunks: ChunkTable, past: LSTMState | None = None) -> Tensor:
        """Encodings (W, E) of all chunks -> outputs (W, D)."""
        hidden_WU = self.lstm(self.embed(e_WE, chunks.index_W), None, chunks.in_rows(), past)
        return self.out(self.drop(hidden_WU))

    def new_state(self, rows: int, chunks: int, device: torch.device | None = None) -> LSTMState:
        """An empty state of so many rows."""
        return self.lstm.new_state(rows, next(self.parameters()).new_empty(0, device=device))


class LSTMDecoder(nn.Module):
    """An LSTM over the tokens of a chunk, each concatenated with the main output, then dropout.

    HAED, Section 3.1, equation 3.
    """

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__()
        self.drop = Dropout(config.dropout, config.recompute)
        self.symbols = config.symbols
        self.embed = nn.Embedding(config.symbols, config.token_dim, padding_idx=config.pad)
        self.lstm = LSTM(config.token_dim, config.dim, config.decoder_units)

    def forward(
        self, tokens_BT: Tensor, main_WD: Tensor | None, chunks: ChunkTable, past: LSTMState | None = None
    ) -> Tensor:
        """Tokens (B, T) and the main output before each of W chunks -> (B, T, U)."""
        if past is not None and main_WD is not None:
            rows_R, main_RD = chunks.begun(main_WD)
            past.begin(rows_R, self.lstm.project_context(main_RD))
        table_VI = table(self.embed, self.symbols, tokens_BT.device)
        hidden_ZU = self.lstm(table_VI, main_WD, chunks.in_chunks(tokens_BT), past)
        return self.drop(hidden_ZU.view(*tokens_BT.shape, -1))

    def new_state(self, rows: int, device: torch.device | None = None) -> LSTMState:
        """An empty state of so many rows, with the projected embeddings of all symbols."""
        return self.lstm.new_state_of_table(rows, table(self.embed, self.symbols, device))


class TransformerDecoder(nn.Module):
    """A small causal transformer over the tokens of a chunk, to each of which the main output is added.

    With a transformer main, that is MEGABYTE's shape (Yu et al., 2023). Attention takes chunks of equal length
    together, everything else all tokens of the batch as one list: nothing is computed for padding.
    """

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__()
        units, length = config.decoder_units, config.max_segment_len
        self.drop = Dropout(config.dropout, config.recompute)
        self.symbols, self.length = config.symbols, length
        self.embed = nn.Embedding(config.symbols, config.token_dim, padding_idx=config.pad)
        self.places = nn.Embedding(length, units)
        self.project_token = projection(config.token_dim, units)
        self.project_context = projection(config.dim, units, bias=False)
        sizes = {field.name: getattr(config, field.name) for field in fields(LayerConfig)}
        sizes |= {"dim": units, "ffn_dim": config.local_ffn_dim or 4 * units, "heads": config.local_heads}
        layers = LayerConfig(**{**sizes, "head_dim": None, "positions": "learned"})
        self.stack = TransformerStack(layers, config.local_layers)

    def forward(
        self, tokens_BT: Tensor, main_WD: Tensor | None, chunks: ChunkTable, past: ChunkCaches | None = None
    ) -> Tensor:
        """Tokens (B, T) and the main output before each of W chunks -> (B, T, U)."""
        steps = chunks.in_chunks(tokens_BT)
        table_VU = past.table_VU if past is not None else self.table(tokens_BT.device)
        if main_WD is not None:
            context_WU = self.project_context(main_WD)
            if past is not None:
                past.begin(*chunks.begun(context_WU))
        if past is not None and steps.more:
            context_WU = past.context_BU
        order_Q, pasts = self._attending(steps, past)
        x_QU = table_VU.index_select(0, steps.symbol_Q[order_Q])
        x_QU = x_QU + context_WU.index_select(0, steps.sequence_Q[order_Q]) + self.places(steps.place_Q[order_Q])
        x_QU = self.stack(self.drop(x_QU), pasts)
        x_ZU = x_QU.new_zeros(steps.slots, x_QU.shape[1]).index_copy(0, steps.slot_Q[order_Q], x_QU)
        return x_ZU.view(*tokens_BT.shape, -1)

    def _attending(
        self, steps: RaggedSteps, past: ChunkCaches | None
    ) -> tuple[Tensor, list[Rectangles] | list[RowCache]]:
        """The order of tokens in which chunks lie one after the other, and what each layer attends by."""
        if past is not None and steps.more:
            return steps.sequence_Q, past.layers.extend(steps.sequence_Q, torch.ones_like(steps.sequence_Q), 1)
        at_Q = steps.one_by_one()
        order_Q = torch.empty_like(at_Q)
        order_Q[at_Q] = torch.arange(at_Q.numel(), device=at_Q.device)
        if past is None:
            return order_Q, [Rectangles(steps.rectangles)] * len(self.stack.layers)
        return order_Q, past.unfinished(steps, at_Q)

    def table(self, device: torch.device | None) -> Tensor:
        """The projected embeddings of all symbols, (V, U)."""
        return self.project_token(table(self.embed, self.symbols, device))

    def new_state(self, rows: int, device: torch.device | None = None) -> ChunkCaches:
        """An empty state of so many rows."""
        return ChunkCaches(self.stack, rows, self.length, self.table(device).detach())


def hierarchy(config: HAEDConfig) -> tuple[Segmentation, ChunkEncoder, TransformerMain | LSTMMain]:
    """The parts of both phases of training: segmentation, chunk encoder and main model."""
    encoder = MLPEncoder(config) if config.encoder == "mlp" else LSTMEncoder(config)
    main = TransformerMain(config) if config.main == "transformer" else LSTMMain(config)
    return Segmentation(config), encoder, main


def initialise_chunks(module: nn.Module, std: float | None) -> None:
    """Draw weights from normal distributions: all with ``std`` or, for None, those of transformers with 0.02."""
    for part in module.modules() if std is None else [module]:
        if std is None and not isinstance(part, TransformerStack):
            continue
        for name, parameter in part.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if std is None else std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])
        elif isinstance(part, ShortConv):
            part.reset_parameters()
    start_residuals(module)


class HAED(CausalModel[HAEDState]):
    """By default an MLP encoder, a transformer main model and an LSTM decoder."""

    config: HAEDConfig
    project: nn.Linear

    def __init__(self, config: HAEDConfig) -> None:
        super().__init__()
        self.config = config
        self.segmentation, self.encoder, self.main = hierarchy(config)
        self.chunk_decoder = LSTMDecoder(config) if config.decoder == "lstm" else TransformerDecoder(config)
        self.project = projection(config.decoder_units, config.vocab_size)
        self.adaptive_softmax = None
        initialise_chunks(self, config.init_std)

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        # Submodules first, since their parents may draw some of their weights in another way.
        for part in reversed(list(self.modules())[1:]):
            if reset := getattr(part, "reset_parameters", None):
                reset()
        initialise_chunks(self, self.config.init_std)

    def features(self, tokens_BT: Tensor, state: HAEDState | None = None) -> Tensor:
        """Features (B, T, U) of all positions (HAED, Section 3.1)."""
        if state is not None and tokens_BT.size(1) > 1 and state.length:
            return torch.cat([self.features(token_B1, state) for token_B1 in tokens_BT.split(1, dim=1)], dim=1)
        chunks = self.segmentation(tokens_BT, state and state.unfinished)
        m_WD = None
        if len(chunks.tokens_WL):  # one more token need not end a chunk
            e_WE = self.encoder(chunks.tokens_WL)  # equation 1: each chunk by itself
            m_WD = self.main(e_WE, chunks, state and state.main)  # equation 2: the chunks up to each
        x_BTU = self.chunk_decoder(tokens_BT, m_WD, chunks, state and state.decoder)  # equation 3: the next chunk
        if state is not None:
            state.move_on(tokens_BT.size(1))
        return x_BTU

    def checked_tokens(self, tokens_BT: Tensor) -> Tensor:
        """As ``CausalModel.checked_tokens``; also raises ValueError for tokens that are no symbols."""
        tokens_BT = super().checked_tokens(tokens_BT)
        most, pad = self.config.vocab_size, self.config.padding_idx
        unknown_BT = ((tokens_BT < 0) | (tokens_BT >= most)) & (tokens_BT != pad)
        if bool(unknown_BT.any()):
            raise ValueError(f"tokens must be symbols, 0 to {most - 1}: got {int(tokens_BT[unknown_BT][0])}")
        return tokens_BT

    def max_length(self) -> int | None:
        return self.config.longest_text

    def new_state(self, batch_size: int, capacity: int = 0, device: torch.device | None = None) -> HAEDState:
        self.check_batch_size(batch_size)
        length = self.segmentation.max_length
        # Words have about five characters; for more chunks, caches grow.
        chunks = 1 + capacity // (length if self.segmentation.kind == "fixed" else min(length, 4))
        device = device or next(self.parameters()).device
        unfinished = Unfinished(batch_size, length, self.segmentation.pad, device)
        main = self.main.new_state(batch_size, chunks, device)
        return HAEDState(self.config, main, self.chunk_decoder.new_state(batch_size, device), unfinished)


class HRED(HAED):
    """A ``HAED`` whose encoder and main model are LSTMs, too."""

    config: HREDConfig
