"""Cached decoding inside fairseq's ``SequenceGenerator``.

The generator shows a decoder one more token at every step, prompts included, and reorders its state at
every step. ``PromptReader`` hands the prompts over before the first step, so that what all rows have in
their prompts is computed in one pass; ``Decoding`` remembers which tokens the state has consumed, so that
whatever a caller shows next, exactly what is missing is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import CannotTruncate, State
from fairseq_ms.core.model import CausalModel
from fairseq_ms.core.steps import Reader


class PromptReader(nn.Module):
    """The "encoder" of a language model, in fairseq's sense: it passes the prompts on, as they are.

    Args:
        padding_idx: the dictionary's padding symbol
    """

    def __init__(self, padding_idx: int) -> None:
        super().__init__()
        self.padding_idx = padding_idx

    def forward_torchscript(self, net_input: dict[str, Tensor]) -> dict[str, Tensor]:
        """The prompts (B, P), cut to the length of the shortest, and the number of each row (B,)."""
        prompts = net_input["src_tokens"]
        shared = int(prompts.ne(self.padding_idx).sum(1).min()) if prompts.numel() else 0
        return {"prompts": prompts[:, :shared], "rows": torch.arange(prompts.size(0), device=prompts.device)}

    def reorder_encoder_out(self, encoder_out: dict[str, Tensor], new_order: Tensor) -> dict[str, Tensor]:
        """Rows in a new order, repeated or dropped."""
        return {name: rows.index_select(0, new_order) for name, rows in encoder_out.items()}


class Decoding:
    """A batch in generation: a model's state, the tokens it has consumed and outputs not asked for yet.

    Args:
        model: of the core
        new_state: from the number of rows and the room for tokens to the state that generation begins with
    """

    def __init__(self, model: CausalModel, new_state: Callable[[int, int], State]) -> None:
        self.model = model
        self.new_state = new_state
        self.read: Reader | None = None
        self.tokens_BT: Tensor | None = None
        self.ahead_BTD: Tensor | None = None

    def last_features(self, tokens_BT: Tensor, prompts: dict[str, Tensor] | None = None) -> Tensor:
        """Features (B, 1, D) at the last of the tokens, given all before it.

        Calls need not continue each other: the state goes back to the longest prefix that it shares with
        ``tokens_BT`` and consumes what is missing. ``prompts`` may tell what the coming tokens will be.
        """
        if self.read is None:
            self._start(tokens_BT, prompts)
        assert self.tokens_BT is not None
        last = tokens_BT.size(1) - 1
        shared = self._shared_prefix(tokens_BT)
        if shared == last + 1 and self.ahead_BTD is not None and last < self.ahead_BTD.size(1):
            # A copy, because the generator divides by the temperature in place.
            return self.ahead_BTD[:, last : last + 1].clone()
        if shared == self.tokens_BT.size(1):
            self.ahead_BTD = None
        features = self._consume(tokens_BT, min(shared, last))
        return features[:, -1:]

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; nothing is copied when the order is the identity."""
        if self.read is None or self.tokens_BT is None:
            return
        if torch.equal(order, torch.arange(self.tokens_BT.size(0), device=order.device)):
            return
        self.read.reorder(order)
        self.tokens_BT = self.tokens_BT.index_select(0, order)
        if self.ahead_BTD is not None:
            self.ahead_BTD = self.ahead_BTD.index_select(0, order)

    def _start(self, tokens_BT: Tensor, prompts: dict[str, Tensor] | None) -> None:
        """Create the state and, where the prompts say more than the tokens do, run over them in one pass."""
        tokens, beams = tokens_BT, None
        if prompts is not None and prompts["prompts"].size(1) > 0:
            prompt = prompts["prompts"]
            # fairseq drops the first column of the prompts where it is what generation starts from anyway.
            if not torch.equal(prompt[:, :1], tokens_BT[:, :1]):
                prompt = torch.cat([tokens_BT[:, :1], prompt], dim=1)
            if torch.equal(prompt[:, : tokens_BT.size(1)], tokens_BT):
                tokens = prompt[:, : self.model.max_length()]
            tokens, beams = _distinct(tokens, prompts["rows"])
        self.read = self._begin(tokens)
        self.ahead_BTD = self.read(tokens)
        self.tokens_BT = tokens
        if beams is not None:
            self.reorder(beams)

    def _begin(self, tokens_BT: Tensor) -> Reader:
        return Reader(self.model, self.new_state(tokens_BT.size(0), 2 * tokens_BT.size(1)))

    def _shared_prefix(self, tokens_BT: Tensor) -> int:
        """How many leading columns the tokens have in common with those consumed, in every row."""
        assert self.tokens_BT is not None
        length = min(tokens_BT.size(1), self.tokens_BT.size(1))
        differs = (tokens_BT[:, :length] != self.tokens_BT[:, :length]).any(0)
        return int(differs.nonzero()[0]) if bool(differs.any()) else length

    def _consume(self, tokens_BT: Tensor, known: int) -> Tensor:
        """Bring the state to exactly these tokens, of which it keeps the first ``known``."""
        assert self.read is not None
        assert self.tokens_BT is not None
        if known < self.tokens_BT.size(1):
            self.ahead_BTD = None
            try:
                self.read.settle().truncate(known)
            except CannotTruncate:
                known = 0
        if known == 0:
            self.read = self._begin(tokens_BT)
        self.tokens_BT = tokens_BT.clone()
        return self.read(tokens_BT[:, known:])


def _distinct(tokens_BT: Tensor, rows_B: Tensor) -> tuple[Tensor, Tensor | None]:
    """One line of tokens for every run of equal ``rows``, and the order that repeats them for all B again.

    The beams of a sentence start out alike: there is no need to run over its prompt more than once. The
    order is None, and the tokens are as given, if there is nothing to save.
    """
    first = torch.cat([rows_B.new_ones(1), rows_B.diff()]).ne(0)
    beams = first.long().cumsum(0) - 1
    distinct = tokens_BT[first]
    if distinct.size(0) == tokens_BT.size(0) or not torch.equal(distinct.index_select(0, beams), tokens_BT):
        return tokens_BT, None
    return distinct, beams
