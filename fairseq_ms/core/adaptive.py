"""Adaptive word embeddings and an adaptive softmax: bands of rarer words are narrower, and cost less."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops.recompute import autocast_to, keep_in_graph


@dataclass(frozen=True)
class Bands:
    """The bands of words, ordered by frequency, of an adaptive embedding or softmax.

    Attributes:
        cutoffs: the first word after each band, ascending; a last band may go on to V
        factor: band b has dim // factor ** b channels
        dropout: probability of dropping features and what they are projected to (softmax alone)
    """

    cutoffs: tuple[int, ...]
    factor: float = 4.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))

    def ends(self, vocab_size: int) -> list[int]:
        """The first word after each band, for the last one V."""
        return list(self.cutoffs) if self.cutoffs[-1] == vocab_size else [*self.cutoffs, vocab_size]

    def width(self, dim: int, band: int) -> int:
        """Channels of a band."""
        return int(dim // self.factor**band)

    def check(self, name: str, vocab_size: int, dim: int, padding_idx: int | None = None) -> None:
        """Raise ValueError, with the field's name, unless bands ascend to V and all have channels.

        A padding symbol must be in the first band.
        """
        if self.factor <= 0.0:
            raise ValueError(f"{name}.factor must be above 0: got {self.factor}")
        first = padding_idx + 1 if padding_idx is not None else 1
        known = (first - 1, *self.cutoffs, vocab_size + 1)
        if not self.cutoffs or any(later <= earlier for earlier, later in pairwise(known)):
            rule = f"{name}.cutoffs must ascend from at least {first} to at most vocab_size {vocab_size}"
            raise ValueError(f"{rule}: got {','.join(map(str, self.cutoffs))}")
        bands = len(self.ends(vocab_size))
        if self.width(dim, bands - 1) < 1:
            raise ValueError(f"{name}.factor {self.factor} leaves the last of {bands} bands no width of dim {dim}")


class AdaptiveInput(nn.Module):
    """Word embeddings, narrower for rarer words, each band projected to D (Baevski and Auli, 2019)."""

    def __init__(self, vocab_size: int, padding_idx: int | None, dim: int, bands: Bands) -> None:
        super().__init__()
        self.cutoff, self.dim = bands.ends(vocab_size), dim
        self.embeddings = nn.ModuleList()
        for band, (start, end) in enumerate(pairwise([0, *self.cutoff])):
            width = bands.width(dim, band)
            words = nn.Embedding(end - start, width, padding_idx if band == 0 else None)
            self.embeddings.append(nn.Sequential(words, nn.Linear(width, dim, bias=False)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        bands: Any = self.embeddings
        for words, projection in bands:
            nn.init.normal_(words.weight, std=words.embedding_dim**-0.5)
            if words.padding_idx is not None:
                nn.init.zeros_(words.weight[words.padding_idx])
            nn.init.xavier_uniform_(projection.weight)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Tokens (B, T) -> (B, T, D)."""
        # Without autocast, so that each band has the type of the tensor that it is written into.
        with autocast_to(tokens_BT.device, None):
            x_BTD = next(self.parameters()).new_zeros(*tokens_BT.shape, self.dim, device=tokens_BT.device)
            idle: list[nn.Parameter] = []
            for (start, end), band in zip(pairwise([0, *self.cutoff]), self.embeddings):
                # Tokens that are no words go to the first or the last band, whose embedding refuses them.
                below_BT = tokens_BT < end if end < self.cutoff[-1] else torch.ones_like(tokens_BT, dtype=torch.bool)
                inside_BT = below_BT & (tokens_BT >= start) if start else below_BT
                if bool(inside_BT.any()):
                    x_BTD[inside_BT] = band(tokens_BT[inside_BT] - start)
                else:
                    idle += band.parameters()
        return keep_in_graph(x_BTD, idle) if self.training else x_BTD


class TiedLinear(nn.Module):
    """A projection by the weight of another module, its owner, or by the transpose."""

    def __init__(self, owner: nn.Module, transpose: bool = False) -> None:
        super().__init__()
        # In a list, so that the owner is no submodule.
        self._owner: list[Any] = [owner]
        self.transpose = transpose
        self.reset_parameters()
        # ``to_empty`` gives this a weight of its own, and so does loading with ``assign``.
        self.register_load_state_dict_post_hook(TiedLinear.reset_parameters)

    def reset_parameters(self, *_: object) -> None:
        """Take the owner's weight, unless the owner computes it from another (parametrizations)."""
        if isinstance(self._owner[0].weight, nn.Parameter):
            self.weight = self._owner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        return F.linear(x, self.weight.t() if self.transpose else self.weight)


class TiedHead(nn.Module):
    """Logits of the first band's words by their embedding, and of the other bands as wholes by a projection."""

    def __init__(self, words: nn.Module, dim: int, bands: int) -> None:
        super().__init__()
        self.word_proj = TiedLinear(words)
        self.class_proj = nn.Linear(dim, bands, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., first cutoff + bands)."""
        return torch.cat([self.word_proj(x), self.class_proj(x)], dim=-1)


class AdaptiveSoftmax(nn.Module):
    """A softmax over the first band's words and the other bands, the head, and one within each other band, the tail.

    Grave et al., 2017.

    Args:
        tied: the embedding whose words predict, too
        tie_projections: project by the transposed projections of ``tied``
        project_head: project features for the head, from D to D (Transformer-XL's ``proj_same_dim``)
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        bands: Bands,
        tied: AdaptiveInput | None = None,
        tie_projections: bool = False,
        project_head: bool = False,
    ) -> None:
        super().__init__()
        self.cutoff, self.drop = bands.ends(vocab_size), nn.Dropout(bands.dropout)
        tails = len(self.cutoff) - 1
        tied_bands: Any = None if tied is None else tied.embeddings

        def project(band: int) -> nn.Module:
            if tied is None or not tie_projections:
                return nn.Linear(dim, bands.width(dim, band), bias=False)
            return TiedLinear(tied_bands[band][1], transpose=True)

        self.project_head = project(0) if project_head else None
        self.head: nn.Module
        if tied is None:
            self.head = nn.Linear(dim, self.cutoff[0] + tails, bias=False)
        else:
            self.head = TiedHead(tied_bands[0][0], dim, tails)
        self.tail = nn.ModuleList()
        for band, (start, end) in enumerate(pairwise(self.cutoff), start=1):
            width = bands.width(dim, band)
            last = nn.Linear(width, end - start, bias=False) if tied is None else TiedLinear(tied_bands[band][0])
            self.tail.append(nn.Sequential(project(band), nn.Dropout(bands.dropout), last))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew but those of the tied embedding."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def _head_logits(self, x: Tensor) -> Tensor:
        return self.head(x if self.project_head is None else self.project_head(x))

    def forward(self, x_BTD: Tensor, target: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Logits of the head and of every other band that has targets, and their targets; None for a band without.

        Targets (B, T) of features (B, T, D), or (Q,) of (Q, D); in the head, a band is a symbol after its words.
        """
        x_QD, target_Q = self.drop(x_BTD.flatten(0, -2)), target.flatten()
        head_Q = target_Q.clone()
        head, tails = self._head_logits(x_QD), list[Tensor | None]()
        targets: list[Tensor | None] = [head_Q]
        for band, (tail, (start, end)) in enumerate(zip(self.tail, pairwise(self.cutoff))):
            row_R = ((target_Q >= start) & (target_Q < end)).nonzero().squeeze(1)
            head_Q[row_R] = self.cutoff[0] + band
            tails.append(tail(x_QD.index_select(0, row_R)) if len(row_R) else None)
            targets.append(target_Q[row_R] - start if len(row_R) else None)
        idle = [p for tail, own in zip(self.tail, tails) if own is None for p in tail.parameters()]
        return [keep_in_graph(head, idle) if self.training else head, *tails], targets

    def log_probs(self, x_BTD: Tensor) -> Tensor:
        """Features (B, T, D) -> log-probabilities (B, T, V) of all words."""
        head = self._head_logits(x_BTD).log_softmax(-1)
        parts = [head[..., : self.cutoff[0]]]
        for band, tail in enumerate(self.tail):
            parts.append(tail(x_BTD).log_softmax(-1) + head[..., self.cutoff[0] + band, None])
        return torch.cat(parts, dim=-1)
