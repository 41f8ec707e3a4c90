"""A transformer layer, and a stack of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fairseq_ms.modules.attention import SelfAttention
from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.kv_cache import Cache, KeyValueCache
from fairseq_ms.modules.typed_list import TypedList
from fairseq_ms.ops.activation import activation_linear
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.norm import norm_linear
from fairseq_ms.ops.recompute import Dropout, checkpointed


class FeedForward(nn.Module):
    """Layer norm (in pre-LN layers), projection, activation, dropout, projection."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim) if config.normalize_before else None
        self.up = Linear(config.dim, config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.dim)
        self.activation = config.activation
        self.dropout = config.activation_dropout
        self.recompute = config.recompute

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        hidden = norm_linear(x, self.norm, self.up, self.recompute)
        dropout = self.dropout if self.training else 0.0
        return activation_linear(hidden, self.activation, dropout, self.down, self.recompute)


class TransformerLayer(nn.Module):
    """Causal self-attention and feed-forward, each behind its layer norm and beside a residual connection."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.ffn = FeedForward(config)
        self.drop = Dropout(config.dropout, config.recompute)

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D); with a cache, x continues the positions that it holds."""
        x_BTD = x_BTD + self.drop(self.attention(x_BTD, cache))
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

    def forward(self, x_BTD: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D). With a cache for each layer, x continues the positions that they hold."""
        if caches is None:
            for layer in self.layers:
                x_BTD = checkpointed(layer, x_BTD, enabled=self.checkpoint)
        else:
            for layer, cache in zip(self.layers, caches, strict=True):
                x_BTD = layer(x_BTD, cache)
        return self.norm(x_BTD)

    def new_caches(self, batch_size: int, capacity: int, like: Tensor) -> list[KeyValueCache]:
        """One empty cache a layer."""
        return [layer.attention.new_cache(batch_size, capacity, like) for layer in self.layers]
