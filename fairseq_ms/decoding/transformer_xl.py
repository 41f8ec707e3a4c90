"""Cached decoding of Transformer-XL: keys and values of the memory and of the segment in progress."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.cache import KeyValueCache, Reorderable
from fairseq_ms.core.ops.relative_attention import hide_future, rel_shift
from fairseq_ms.core.streaming.layer import RelativeAttention, TransformerXLLayer, shift
from fairseq_ms.core.streaming.memory import Memory, Mems
from fairseq_ms.decoding.streaming import StreamState

if TYPE_CHECKING:
    from fairseq_ms.models.transformer_xl import TransformerXLDecoder


class CachedLayer:
    """A layer over a segment that comes in pieces, and the projected sinusoids of its window, which stay.

    Attributes:
        inputs_BTD: what the layer has read of the segment
    """

    def __init__(self, layer: TransformerXLLayer) -> None:
        self.layer = layer
        self.r_PNH: Tensor | None = None

    def begin(self, m_BMD: Tensor, segment: int, positions_PD: Tensor) -> None:
        """Get ready for at most ``segment`` positions behind a memory."""
        attention = self.layer.attention
        if self.r_PNH is None:
            self.r_PNH = attention.project(positions_PD)
        k, v = _keys_values(attention, m_BMD)
        self.cache = KeyValueCache(k.size(0), k.size(1), k.size(3), m_BMD.size(1) + segment, k)
        self.cache.append(k, v)
        self.inputs_BTD = m_BMD[:, :0]

    def __call__(self, s_BTD: Tensor) -> Tensor:
        """The layer's outputs at the next positions, (B, T, D) -> (B, T, D)."""
        self.inputs_BTD = torch.cat([self.inputs_BTD, s_BTD], dim=1)
        layer = self.layer
        s_BTD = layer.after_attention(s_BTD + self._attend(s_BTD))
        return layer.after_ffn(s_BTD + layer.ffn(s_BTD))

    def _attend(self, s_BTD: Tensor) -> Tensor:
        assert self.r_PNH is not None
        attention = self.layer.attention
        x_BTD = attention.norm(s_BTD) if attention.norm is not None else s_BTD
        # (B, T, 3 * N * H) -> 3 of (B, N, T, H)
        q, k, v = attention.qkv(x_BTD).unflatten(-1, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = self.cache.append(k, v)
        keys = k.size(2)
        by_distance = (q + attention.v[:, None]) @ self.r_PNH[-(keys + 1) :].permute(1, 2, 0)
        bias = hide_future(rel_shift(by_distance, keys) / math.sqrt(q.size(-1)))
        y = F.scaled_dot_product_attention(q + attention.u[:, None], k, v, attn_mask=bias)
        return attention.out(y.transpose(1, 2).flatten(2))

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.cache.reorder(order)
        self.inputs_BTD = self.inputs_BTD.index_select(0, order)


def _keys_values(attention: RelativeAttention, m_BMD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, N, M, H) of a memory."""
    m_BMD = attention.norm(m_BMD) if attention.norm is not None else m_BMD
    kv = F.linear(m_BMD, attention.qkv.weight[attention.qkv.out_features // 3 :])
    k, v = kv.unflatten(-1, (2, attention.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return k, v


class TransformerXLState(StreamState):
    """A cache a layer."""

    decoder: TransformerXLDecoder

    def __init__(self, decoder: TransformerXLDecoder, start: Memory) -> None:
        self.layers = [CachedLayer(layer) for layer in decoder.layers]
        super().__init__(decoder, start)

    def past(self, index: int) -> Tensor:
        """What precedes the segment in a layer, (B, M, D)."""
        return self.mems[f"layer{index}"]

    def begin(self) -> None:
        segment, positions_PD = self.decoder.segment_len, self.decoder.sinusoids()
        for index, layer in enumerate(self.layers):
            layer.begin(self.past(index), segment, positions_PD)

    def advance(self, x_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return x_BTD

    def end(self) -> Mems:
        names = (f"layer{index}" for index in range(len(self.layers)))
        return {name: shift(layer.inputs_BTD, self.mems[name]) for name, layer in zip(names, self.layers)}

    def parts(self) -> Iterable[Reorderable]:
        return self.layers
