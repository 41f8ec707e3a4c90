"""What every model is made of: embedded tokens, causal self-attention, feed-forward, and stacks of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fairseq_ms.core.ops.attention import self_attention_linear
from fairseq_ms.core.ops.linear import ACTIVATIONS, FeedForward, Linear, norm_linear
from fairseq_ms.core.ops.recompute import Dropout, checkpointed
from fairseq_ms.core.ops.rotary import rotate

M = TypeVar("M", bound=nn.Module)


class TypedList(nn.ModuleList, Generic[M]):
    """``nn.ModuleList`` of modules of one class, which type checkers know."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[M] = ()) -> None: ...

        def __iter__(self) -> Iterator[M]: ...


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Sizes and probabilities of transformer layers.

    Attributes:
        dim: model dimension D
        ffn_dim: width of the feed-forward block
        heads: attention heads N
        head_dim: width H of a head, D / N if not given
        dropout, attention_dropout, activation_dropout: probabilities
        activation: a key of ``ops.linear.ACTIVATIONS``
        recompute: keep less for backward (see ``ops/README.md``)
        checkpoint: keep only the input of every layer and run it again in backward

    Raises ValueError for an unknown activation and for a probability below 0, or 1 and above.
    """

    dim: int
    ffn_dim: int
    heads: int
    head_dim: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "gelu"
    recompute: bool = True
    checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}: got {self.activation!r}")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            check_probability(name, getattr(self, name))

    @property
    def width_of_head(self) -> int:
        """H."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    def feed_forward(self, normalize: bool = True) -> FeedForward:
        """The feed-forward block of one layer, with a layer norm in front unless the layer is post-LN."""
        return FeedForward(self.dim, self.ffn_dim, self.activation, self.activation_dropout, normalize, self.recompute)


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless it is at least 0 and below 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1: got {value}")


class TokenEmbedding(nn.Module):
    """Word embedding, plus that of the position where positions are learned, then dropout.

    Args:
        words: maps (B, T) to (B, T, D): ``nn.Embedding`` or ``AdaptiveInput``
        positions: how many positions there are, or None for no position embedding
        dim: model dimension D
        dropout: probability
        recompute: keep the dropout mask as a seed
    """

    def __init__(
        self, words: nn.Module, positions: int | None, dim: int, dropout: float = 0.0, recompute: bool = True
    ) -> None:
        super().__init__()
        self.words = words
        self.dim = dim
        self.drop = Dropout(dropout, recompute)
        self.positions = nn.Embedding(positions, dim) if positions is not None else None

    def forward(self, tokens_BT: Tensor, start: int = 0) -> Tensor:
        """Embeddings (B, T, D) of tokens at positions start .. start + T - 1.

        Padding has to be on the right: it then never lies in the past of a token that counts.
        """
        x_BTD = self.words(tokens_BT)
        if self.positions is not None:
            positions_T = torch.arange(start, start + tokens_BT.size(1), device=tokens_BT.device)
            x_BTD = x_BTD + self.positions(positions_T)
        return self.drop(x_BTD)

    def like(self) -> Tensor:
        """An empty (1, 1, D), of the type and on the device of what ``forward`` gives."""
        return next(self.parameters()).new_empty(1, 1, self.dim)


class Attending(Protocol):
    """How positions are joined by attention where they are no rectangle of whole texts: a cache, or chunks."""

    def attend(self, qkv: Tensor, heads: int, dropout: float, recompute: bool) -> Tensor:
        """Projected queries, keys and values (..., 3 * N * H) -> what the heads read (..., N * H)."""


class SelfAttention(nn.Module):
    """Causal: layer norm, one projection to queries, keys and values, attention to the past, projection back.

    Args:
        config: sizes and probabilities; N heads of H each, where N * H need not be D
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.width_of_head
        self.dropout = config.attention_dropout
        self.recompute = config.recompute
        self.norm = nn.LayerNorm(config.dim)
        self.qkv = Linear(config.dim, 3 * self.heads * self.head_dim)
        self.qkv.rows = 3 * (self.heads * self.head_dim,)
        self.out = Linear(self.heads * self.head_dim, config.dim)

    def forward(self, x_BTD: Tensor, past: Attending | None = None, rotation_2TF: Tensor | None = None) -> Tensor:
        """Attend from every position to itself and all before it, (B, T, D) -> (B, T, D).

        With ``past``, its ``attend`` decides what lies before a position, and takes in keys and values of x. With the
        ``rotation`` of its T positions, queries and keys are turned by them.
        """
        qkv = rotate(norm_linear(x_BTD, self.norm, self.qkv, self.recompute), rotation_2TF, 2 * self.heads)
        dropout = self.dropout if self.training else 0.0
        if past is None:
            return self_attention_linear(qkv, self.heads, self.out, dropout, self.recompute)
        return self.out(past.attend(qkv, self.heads, dropout, self.recompute))


class TransformerLayer(nn.Module):
    """Causal self-attention and feed-forward, each behind its layer norm and beside a residual connection."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.ffn = config.feed_forward()
        self.drop = Dropout(config.dropout, config.recompute)

    def forward(self, x_BTD: Tensor, past: Attending | None = None, rotation_2TF: Tensor | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D); ``past`` and rotation as in ``SelfAttention``."""
        x_BTD = x_BTD + self.drop(self.attention(x_BTD, past, rotation_2TF))
        return x_BTD + self.drop(self.ffn(x_BTD))


class TransformerStack(nn.Module):
    """Layers one after the other, and a layer norm behind the last.

    Args:
        config: what the layers have in common
        layers: how many
    """

    def __init__(self, config: LayerConfig, layers: int) -> None:
        super().__init__()
        self.checkpoint = config.checkpoint
        self.layers = TypedList(TransformerLayer(config) for _ in range(layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(
        self, x_BTD: Tensor, pasts: Sequence[Attending] | None = None, rotation_2TF: Tensor | None = None
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D); one ``past`` a layer and one rotation for all, as in ``SelfAttention``."""
        nothing: Sequence[Attending | None] = [None] * len(self.layers)
        for layer, past in zip(self.layers, pasts or nothing, strict=True):
            inputs = x_BTD, past, rotation_2TF
            x_BTD = checkpointed(layer, *inputs) if self.checkpoint else layer(*inputs)
        return self.norm(x_BTD)
