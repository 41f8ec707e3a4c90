"""The few classes of fairseq's that the models build on, for where there is no fairseq.

Parameters and buffers have the names that fairseq's have. Nothing here is used while fairseq is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Vocabulary:
    """What the models ask of fairseq's ``Dictionary``.

    Args:
        size: number of symbols V
        symbols: the index of every symbol that a model may ask for by name
    """

    def __init__(self, size: int, symbols: dict[str, int]) -> None:
        self.size = size
        self.symbols = symbols

    def __len__(self) -> int:
        return self.size

    def pad(self) -> int:
        return 1

    def eos(self) -> int:
        return 2

    def unk(self) -> int:
        return 3

    def index(self, symbol: str) -> int:
        return self.symbols.get(symbol, self.unk())


class FairseqIncrementalDecoder(nn.Module):
    """The base of all decoders."""

    def __init__(self, dictionary: Vocabulary) -> None:
        super().__init__()
        self.dictionary = dictionary


class LearnedPositionalEmbedding(nn.Embedding):
    """An embedding of positions that are given."""

    def forward(self, input: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return F.embedding(positions, self.weight)


class AdaptiveInput(nn.Module):
    """Word embeddings that are narrower for rarer words, each band projected to one width (Baevski and Auli, 2019)."""

    def __init__(
        self, vocab_size: int, padding_idx: int, initial_dim: int, factor: float, output_dim: int, cutoff: list[int]
    ) -> None:
        super().__init__()
        self.cutoff = cutoff if cutoff[-1] == vocab_size else [*cutoff, vocab_size]
        self.embedding_dim = output_dim
        self.embeddings = nn.ModuleList()
        for band, (start, end) in enumerate(zip([0, *self.cutoff], self.cutoff)):
            dim = int(initial_dim // factor**band)
            words = nn.Embedding(end - start, dim, padding_idx if band == 0 else None)
            self.embeddings.append(nn.Sequential(words, nn.Linear(dim, output_dim, bias=False)))
        self.register_buffer("_float_tensor", torch.zeros(1))

    def weights_for_band(self, band: int) -> tuple[nn.Parameter, nn.Parameter]:
        """The embedding and the projection of a band."""
        embedding: Any = self.embeddings[band]
        return embedding[0].weight, embedding[1].weight

    def forward(self, input: Tensor) -> Tensor:
        """Tokens (B, T) -> (B, T, D)."""
        result = self.weights_for_band(0)[1].new_zeros(*input.shape, self.embedding_dim)
        for start, end, embedding in zip([0, *self.cutoff], self.cutoff, self.embeddings):
            inside = (input >= start) & (input < end)
            result[inside] = embedding(input[inside] - start)
        return result


class TiedLinear(nn.Module):
    """A projection by somebody else's weight."""

    def __init__(self, weight: nn.Parameter, transpose: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.transpose = transpose

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.t() if self.transpose else self.weight)


class TiedHead(nn.Module):
    """Logits of the most frequent words by their embedding, and of the other bands by a projection."""

    def __init__(self, words: nn.Parameter, dim: int, bands: int) -> None:
        super().__init__()
        self.word_proj = TiedLinear(words)
        self.class_proj = nn.Linear(dim, bands, bias=False)
        self.register_buffer("_float_tensor", torch.zeros(1))

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([self.word_proj(input), self.class_proj(input)], dim=-1)


class AdaptiveSoftmax(nn.Module):
    """A softmax over frequent words and bands of rarer ones, and one within each band (Grave et al., 2017)."""

    def __init__(
        self,
        vocab_size: int,
        input_dim: int,
        cutoff: list[int],
        dropout: float,
        factor: float = 4.0,
        adaptive_inputs: AdaptiveInput | None = None,
        tie_proj: bool = False,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.cutoff = cutoff if cutoff[-1] == vocab_size else [*cutoff, vocab_size]
        bands = len(self.cutoff) - 1
        self.head: nn.Module
        if adaptive_inputs is None:
            self.head = nn.Linear(input_dim, self.cutoff[0] + bands, bias=False)
        else:
            self.head = TiedHead(adaptive_inputs.weights_for_band(0)[0], input_dim, bands)
        self.tail = nn.ModuleList()
        for band, (start, end) in enumerate(zip(self.cutoff, self.cutoff[1:]), start=1):
            first: nn.Module
            last: nn.Module
            if adaptive_inputs is None:
                dim = int(input_dim // factor**band)
                first, last = nn.Linear(input_dim, dim, bias=False), nn.Linear(dim, end - start, bias=False)
            else:
                words, projection = adaptive_inputs.weights_for_band(band)
                if tie_proj:
                    first = TiedLinear(projection, transpose=True)
                else:
                    first = nn.Linear(projection.size(0), projection.size(1), bias=False)
                last = TiedLinear(words)
            self.tail.append(nn.Sequential(first, nn.Dropout(dropout), last))
        self.register_buffer("version", torch.ones(1, dtype=torch.long))

    def get_log_prob(self, input: Tensor, target: None) -> Tensor:
        """Features (B, T, D) -> log-probabilities (B, T, V) of all words."""
        head = self.head(input).log_softmax(-1)
        parts = [head[..., : self.cutoff[0]]]
        for band, tail in enumerate(self.tail):
            prior = head[..., self.cutoff[0] + band, None]
            parts.append(tail(input).log_softmax(-1) + prior)
        return torch.cat(parts, dim=-1)
