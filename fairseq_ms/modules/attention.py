"""Causal multi-head self-attention behind its layer norm."""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.kv_cache import Cache, KeyValueCache
from fairseq_ms.ops.attention import attend, merge_heads, self_attention_linear, split_qkv
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.norm import norm_linear


class SelfAttention(nn.Module):
    """Layer norm, one projection to queries, keys and values, attention to the past, projection back.

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
