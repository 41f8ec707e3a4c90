"""Token and position embeddings."""

from __future__ import annotations

import torch
from fairseq.modules import AdaptiveInput, LearnedPositionalEmbedding
from torch import Tensor, nn

from fairseq_ms.ops.device import autocast_of
from fairseq_ms.ops.idle import keep_in_graph
from fairseq_ms.ops.recompute import Dropout


class TokenEmbedding(nn.Module):
    """Word plus learned position embedding, then dropout.

    Args:
        words: maps (B, T) to (B, T, D): ``nn.Embedding`` or fairseq's ``AdaptiveInput``
        positions: how many positions there are, or None for no position embedding
        dim: model dimension D
        dropout: probability
        recompute: keep the dropout mask as a seed
    """

    def __init__(
        self,
        words: nn.Module,
        positions: int | None,
        dim: int,
        dropout: float = 0.0,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        self.words = words
        self.dim = dim
        self.drop = Dropout(dropout, recompute)
        # Without a padding index, because positions are given and not counted from the padding.
        self.positions = LearnedPositionalEmbedding(positions, dim, None) if positions is not None else None

    def forward(self, tokens_BT: Tensor, start: int = 0) -> Tensor:
        """Embeddings (B, T, D) of tokens at positions start .. start + T - 1.

        Padding has to be on the right: it then never lies in the past of a token that counts.
        """
        if isinstance(self.words, AdaptiveInput):
            # It writes the projections of its bands into a tensor of its own type, which those of autocast are not.
            with autocast_of(tokens_BT, enabled=False):
                x_BTD = self.words(tokens_BT)
            if self.training:
                x_BTD = keep_in_graph(x_BTD, _idle_bands(self.words, tokens_BT))
        else:
            x_BTD = self.words(tokens_BT)
        if self.positions is not None:
            positions = torch.arange(start, start + tokens_BT.size(1), device=tokens_BT.device)
            x_BTD = x_BTD + self.positions(tokens_BT, positions=positions.unsqueeze(0))
        return self.drop(x_BTD)

    def like(self) -> Tensor:
        """An empty (1, 1, D), of the type and on the device of what ``forward`` gives."""
        return next(self.parameters()).new_empty(1, 1, self.dim)


def _idle_bands(words: AdaptiveInput, tokens_BT: Tensor) -> list[nn.Parameter]:
    """The parameters of bands of the vocabulary of which there is no token."""
    starts = [0, *words.cutoff[:-1]]
    return [
        parameter
        for start, end, band in zip(starts, words.cutoff, words.embeddings)
        if not bool(((tokens_BT >= start) & (tokens_BT < end)).any())
        for parameter in band.parameters()
    ]
