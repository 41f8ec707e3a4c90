"""What both phases of training share: segmentation, chunk encoder and main model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_ms.modules.hierarchical.chunk_encoder import ChunkEncoder
from fairseq_ms.modules.hierarchical.chunk_main import LSTMMain, RecurrentState, TransformerMain
from fairseq_ms.modules.hierarchical.chunks import ChunkTable
from fairseq_ms.modules.hierarchical.rows import RowCaches
from fairseq_ms.modules.hierarchical.segmentation import Segmentation


class Hierarchy(nn.Module):
    """From tokens to what is known about every next chunk (Hierarchical Attention Encoder Decoder, equations 1, 2)."""

    def __init__(self, segmentation: Segmentation, encoder: ChunkEncoder, main: TransformerMain | LSTMMain) -> None:
        super().__init__()
        self.segmentation = segmentation
        self.encoder = encoder
        self.main = main

    def table(self, tokens_BT: Tensor, padded: bool = True) -> ChunkTable:
        """The chunks of a batch of tokens; unless ``padded``, the padding symbol is a token like the others."""
        valid_BT = tokens_BT != self.encoder.pad if padded else torch.ones_like(tokens_BT, dtype=torch.bool)
        valid_BT[:, 0] = True
        ends_BT = self.segmentation.ends(tokens_BT, valid_BT)
        return ChunkTable.of(tokens_BT, ends_BT, valid_BT, self.encoder.pad, self.segmentation.max_length)

    def forward(self, chunks: ChunkTable, state: RowCaches | RecurrentState | None = None) -> Tensor:
        """The main output (M, D) behind each of M chunks; a fresh state of the main model is filled on the way."""
        return self.main(self.encoder(chunks.tokens_ML), chunks, state)  # type: ignore[no-any-return]


def extended(src_tokens_BT: Tensor, target_BT: Tensor, pad: int) -> Tensor:
    """The source tokens of each row and, behind its last one, its last target: (B, T + 1)."""
    tokens_BT = torch.cat([src_tokens_BT, torch.full_like(src_tokens_BT[:, :1], pad)], dim=1)
    lengths_B1 = (src_tokens_BT != pad).sum(dim=1, keepdim=True)
    last_B1 = target_BT.gather(1, (lengths_B1 - 1).clamp(min=0))
    return tokens_BT.scatter(1, lengths_B1, last_B1)
