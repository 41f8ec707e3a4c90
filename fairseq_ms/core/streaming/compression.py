"""The Compressive Transformer's compression of memories that fall out, and what it is trained on (Rae et al.)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_ms.core.streaming.layer import TransformerXLLayer


def reconstruction_loss(
    layer: TransformerXLLayer, segment_BTD: Tensor, old_BMD: Tensor, compressed_BCD: Tensor
) -> Tensor:
    """How differently the layer's heads read the compressed memory and the memory it was made of, of every row (B,).

    The mean squared difference of what attention by content alone (no positions, neither u nor v) brings back from
    either. Only ``compressed`` passes a gradient on: everything else is detached, the layer's weights included.
    The mean is at least of float32: in half precision, its product with a sample size overflows, forward or backward.
    """
    segment_BTD, old_BMD = segment_BTD.detach(), old_BMD.detach()
    precise = torch.promote_types(compressed_BCD.dtype, torch.float32)
    by_compressed, by_old = (_read(layer, segment_BTD, memory).to(precise) for memory in (compressed_BCD, old_BMD))
    return (by_compressed - by_old).square().mean(dim=(1, 2))


def _read(layer: TransformerXLLayer, segment_BTD: Tensor, memory_BMD: Tensor) -> Tensor:
    """Attention by content from the segment to a memory, (B, T, N * H), with weights that are not trained."""
    attention, norm = layer.attention, layer.attention.norm
    weight_ED = attention.qkv.weight.detach()
    inner = weight_ED.size(0) // 3
    if norm is not None:
        scale, offset = norm.weight.detach(), norm.bias.detach()
        segment_BTD, memory_BMD = (
            F.layer_norm(x, norm.normalized_shape, scale, offset, norm.eps) for x in (segment_BTD, memory_BMD)
        )
    # (B, T, N * H) -> (B, N, T, H)
    q = F.linear(segment_BTD, weight_ED[:inner]).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
    kv = F.linear(memory_BMD, weight_ED[inner:]).unflatten(-1, (2, attention.heads, -1))
    k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def falling_out(memory_BMD: Tensor, segment_BTD: Tensor) -> Tensor:
    """The states (B, T, D) that leave the memory when a segment of T states moves in."""
    length = segment_BTD.size(1)
    if memory_BMD.size(1) >= length:
        return memory_BMD[:, :length].detach()
    return torch.cat([memory_BMD, segment_BTD], dim=1)[:, :length].detach()
