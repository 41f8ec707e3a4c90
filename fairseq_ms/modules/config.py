"""What every layer of a model has in common."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq_ms.ops.linear import FeedForward


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and probabilities of transformer layers.

    Attributes:
        dim: model dimension D
        ffn_dim: width of the feed-forward block
        heads: attention heads N
        dropout, attention_dropout, activation_dropout: probabilities
        activation: a key of ``ops.linear.ACTIVATIONS``
        head_dim: width H of a head, D / N if not given
        normalize_before: pre-LN if True, post-LN if False (which only streaming layers offer)
        recompute: keep less for backward (see ``ops/README.md``)
        checkpoint: keep only the input of every layer and run it again in backward
    """

    dim: int
    ffn_dim: int
    heads: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "gelu"
    head_dim: int | None = None
    normalize_before: bool = True
    recompute: bool = True
    checkpoint: bool = False

    @property
    def width_of_head(self) -> int:
        """H."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    def feed_forward(self) -> FeedForward:
        """The feed-forward block of one layer."""
        return FeedForward(
            self.dim, self.ffn_dim, self.activation, self.activation_dropout, self.normalize_before, self.recompute
        )
