"""A transformer layer, and a stack of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.kv_cache import Cache, KeyValueCache
from fairseq_ms.modules.typed_list import TypedList
from fairseq_ms.ops.attention import attend, merge_heads, self_attention_linear, split_qkv
from fairseq_ms.ops.linear import Linear, norm_linear
from fairseq_ms.ops.recompute import Dropout, checkpointed


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
        self.out = Linear(self.heads * self.head_dim, config.dim)

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        """Attend from every position to itself and all before it, those in ``cache`` included.

        (B, T, D) -> (B, T, D). The keys and values of x are appended to the cache.
        """
        qkv = norm_linear(x_BTD, self.norm, self.qkv, self.recompute)
        dropout = self.dropout if self.training else 0.0
        if cache is None:
            return self_attention_linear(qkv, self.heads, self.out, dropout, self.recompute)
        q, k, v = split_qkv(qkv, self.heads)
        k, v = cache.append(k, v)
        return self.out(merge_heads(attend(q, k, v, bias=cache.bias, causal=cache.bias is None)))

    def new_cache(self, batch_size: int, capacity: int, like: Tensor) -> KeyValueCache:
        """An empty cache of keys and values, of the type and on the device of ``like``."""
        return KeyValueCache(batch_size, self.heads, self.head_dim, capacity, like)


class TransformerLayer(nn.Module):
    """Causal self-attention and feed-forward, each behind its layer norm and beside a residual connection."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.ffn = config.feed_forward()
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
                x_BTD = checkpointed(layer, x_BTD) if self.checkpoint else layer(x_BTD)
        else:
            for layer, cache in zip(self.layers, caches, strict=True):
                x_BTD = layer(x_BTD, cache)
        return self.norm(x_BTD)

    def new_caches(self, batch_size: int, capacity: int, like: Tensor) -> list[KeyValueCache]:
        """One empty cache a layer."""
        return [layer.attention.new_cache(batch_size, capacity, like) for layer in self.layers]
