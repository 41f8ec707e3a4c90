"""A transformer layer, and a stack of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_ms.modules.attention import SelfAttention
from fairseq_ms.modules.feedforward import FeedForward
from fairseq_ms.ops.recompute import dropout


@dataclass(frozen=True)
class LayerConfig:
    """What every layer of a model has in common.

    Attributes:
        dim: model dimension D
        ffn_dim: width of the feed-forward block
        heads: attention heads N
        dropout, attention_dropout, activation_dropout: probabilities
        activation: a key of ``activation.ACTIVATIONS``
        normalize_before: pre-LN if True, post-LN if False
        recompute: keep less for backward (see ``ops/recompute.py``)
        checkpoint: keep only the input of every layer and run it again in backward
        final_norm: whether a pre-LN stack ends in a layer norm
    """

    dim: int
    ffn_dim: int
    heads: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "gelu"
    normalize_before: bool = True
    recompute: bool = True
    checkpoint: bool = False
    final_norm: bool = True

    def self_attention(self) -> SelfAttention:
        """Full causal self-attention of this configuration."""
        return SelfAttention(self.dim, self.heads, self.attention_dropout, self.recompute)


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each with a residual connection, pre-LN or post-LN.

    Args:
        config: sizes and probabilities
        attention: called as ``attention(x, norm, mask, cache)``; full causal self-attention if not given
    """

    def __init__(self, config: LayerConfig, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.normalize_before = config.normalize_before
        self.recompute = config.recompute
        self.attention = attention if attention is not None else config.self_attention()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.ffn = FeedForward(
            config.dim, config.ffn_dim, config.activation, config.activation_dropout, config.recompute
        )
        self.ffn_norm = nn.LayerNorm(config.dim)

    def forward(self, x_BTD: Tensor, mask: Any = None, cache: Any = None) -> Tensor:
        """x (B, T, D) -> (B, T, D); ``mask`` and ``cache`` are handed to the attention as they are."""
        if self.normalize_before:
            x_BTD = x_BTD + self._drop(self.attention(x_BTD, self.attention_norm, mask, cache))
            return x_BTD + self._drop(self.ffn(x_BTD, self.ffn_norm))
        x_BTD = self.attention_norm(x_BTD + self._drop(self.attention(x_BTD, None, mask, cache)))
        return self.ffn_norm(x_BTD + self._drop(self.ffn(x_BTD)))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training, self.recompute)


class TransformerStack(nn.Module):
    """Layers one after the other and, if they are pre-LN, a layer norm behind the last.

    Args:
        config: what the layers have in common
        layers: how many
        attention: makes a layer's attention; full causal self-attention if not given
    """

    def __init__(self, config: LayerConfig, layers: int, attention: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.checkpoint = config.checkpoint
        self.layers = nn.ModuleList(
            TransformerLayer(config, attention() if attention is not None else None) for _ in range(layers)
        )
        ends_in_norm = config.normalize_before and config.final_norm
        self.final_norm = nn.LayerNorm(config.dim) if ends_in_norm else None

    def new_caches(self, batch_size: int, capacity: int, like: Tensor) -> list[Any]:
        """One empty cache a layer."""
        return [layer.attention.new_cache(batch_size, capacity, like) for layer in self.layers]  # type: ignore[union-attr, operator]

    def forward(self, x_BTD: Tensor, mask: Any = None, caches: Sequence[Any] | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D). With caches, x continues the positions that they hold."""
        for number, layer in enumerate(self.layers):
            if self.checkpoint and torch.is_grad_enabled() and caches is None:
                x_BTD = checkpoint(layer, x_BTD, mask, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, mask, caches[number] if caches is not None else None)
        return self.final_norm(x_BTD) if self.final_norm is not None else x_BTD
