"""Where a chunk of tokens ends, as a function of the tokens read so far and of nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Segmentation(nn.Module):
    """Split a token stream into chunks that end causally (Hierarchical Attention Encoder Decoder, 4 and Appendix A).

    ``words`` ends a chunk after a separator symbol or after ``max_length`` tokens, ``fixed`` after every ``max_length``
    tokens. The first token of a sequence is a chunk by itself: it is what is known before anything is predicted, so
    the chunks behind it are chunks of *predicted* tokens and, with pixels, fall on whole pixels.

    Args:
        kind: ``words`` or ``fixed``.
        max_length: the greatest number of tokens in a chunk, at least 1.
        separators: indices of the symbols that end a word; needed by ``words``, not allowed with ``fixed``.
        vocabulary: number of symbols V.

    Raises:
        ValueError: for a kind, length or set of separators outside these rules.
    """

    is_separator_V: Tensor

    def __init__(self, kind: str, max_length: int, separators: tuple[int, ...], vocabulary: int) -> None:
        super().__init__()
        if kind not in ("words", "fixed"):
            raise ValueError(f"segmentation must be words or fixed, not {kind!r}")
        if max_length < 1:
            raise ValueError(f"the greatest chunk length must be at least 1, not {max_length}")
        if (kind == "words") != bool(separators):
            raise ValueError(f"separators belong to words and to nothing else, got {separators!r} with {kind!r}")
        self.kind = kind
        self.max_length = max_length
        is_separator_V = torch.zeros(vocabulary, dtype=torch.bool)
        is_separator_V[list(separators)] = True
        # Derived from the dictionary, so it is rebuilt and not stored in checkpoints.
        self.register_buffer("is_separator_V", is_separator_V, persistent=False)

    def ends(self, tokens_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """True where a token is the last of its chunk; (B, T) tokens to (B, T) booleans.

        Positions that are not valid are padding: they end nothing and count for nothing, wherever they stand. What
        ends at position t depends on positions up to t only.
        """
        number_BT = valid_BT.cumsum(dim=1) - 1
        separator_BT = self.is_separator_V[tokens_BT] & valid_BT
        # A separator restarts the count and so does reaching the greatest length: within the run after a separator the
        # chunks are as long as they may be, and the place of a token is its distance to the separator, modulo that. The
        # first token is at distance 0 of where counting starts, and so ends its chunk.
        last_BT = torch.where(separator_BT, number_BT, torch.zeros_like(number_BT)).cummax(dim=1).values
        before_BT = torch.cat([last_BT[:, :1], last_BT[:, :-1]], dim=1)
        full_BT = (number_BT - before_BT) % self.max_length == 0
        return separator_BT | (full_BT & valid_BT)

    def advance(self, place_B: Tensor, token_B: Tensor) -> tuple[Tensor, Tensor]:
        """One step of ``ends``: from a token and its place in its chunk to whether it ends it and the next place.

        A negative place marks the first token of a sequence.
        """
        ends_B = self.is_separator_V[token_B] | (place_B < 0) | (place_B == self.max_length - 1)
        return ends_B, torch.where(ends_B, torch.zeros_like(place_B), place_B + 1)
