"""What every cached decoding is: a batch of sequences that grow by a token at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class CannotTruncate(Exception):
    """A state has forgotten what it would need to go back; the caller starts from the tokens again."""


class DecodingState(ABC):
    """A model at work on a batch, ``length`` tokens into every row; nothing of it hides in the model."""

    length: int

    @abstractmethod
    def prefill(self, tokens_BT: Tensor) -> Tensor:
        """Take in the first T tokens of every row, in one pass; features (B, T, D) of all of them."""

    @abstractmethod
    def step(self, tokens_B1: Tensor) -> Tensor:
        """Take in one more token of every row; its features (B, 1, D)."""

    @abstractmethod
    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was; order (B',) may repeat and drop rows.

        The caller leaves out an order that changes nothing: to find out costs a wait for the GPU, once for everything.
        """

    def truncate(self, length: int) -> None:
        """Go back to the state after ``length`` tokens; raises ``CannotTruncate`` if that is forgotten."""
        if length != self.length:
            raise CannotTruncate
