"""From hidden states to logits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops.linear import Linear
from fairseq_ms.core.ops.packing import PackedWeight, pack


class TiedOutput(nn.Module):
    """Logits by the transposed word embedding; owns no parameter."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        # In a list, so that the embedding does not appear in the state dict a second time.
        self._words = [words]
        self.packed: PackedWeight | None = None

    @property
    def weight(self) -> Tensor:
        """The word embedding (V, D)."""
        return self._words[0].weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x (B, T, D) -> logits (B, T, V)."""
        if self.packed is not None:
            return self.packed.linear(x_BTD, self._words[0].weight)
        return F.linear(x_BTD, self._words[0].weight)

    def make_generation_fast_(self, **unused: object) -> None:
        """fairseq's hook, called once before evaluation and generation."""
        self.packed = pack(self._words[0].weight)

    def _apply(self, fn, recurse: bool = True):
        self.packed = None
        return super()._apply(fn, recurse)


def untied_output(dim: int, vocabulary: int) -> Linear:
    """A projection of its own to the vocabulary, (B, T, D) -> (B, T, V), without bias."""
    return Linear(dim, vocabulary, bias=False)
