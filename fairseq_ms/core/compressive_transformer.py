"""The Compressive Transformer: a Transformer-XL whose oldest memories are kept in compressed form (Rae et al., 2020).

The memory of a layer is [compressed memory, memory].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.layers import TypedList
from fairseq_ms.core.ops.attention import split_qkv
from fairseq_ms.core.pooling import Downsample
from fairseq_ms.core.stream_state import Mems, shift
from fairseq_ms.core.streaming import TransformerXLLayer
from fairseq_ms.core.transformer_xl import TransformerXL, TransformerXLConfig


@dataclass(frozen=True, kw_only=True)
class CompressiveTransformerConfig(TransformerXLConfig):
    """Sizes of a ``CompressiveTransformer``.

    Attributes:
        compressed_mem_len: length of every layer's compressed memory, in compressed states
        compression_rate: states that are compressed into one
        reconstruction_loss_weight: weight of the loss that trains the compression
    """

    mem_len: int = 12
    compressed_mem_len: int = 12
    compression_rate: int = 2
    reconstruction_loss_weight: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        rate, length = self.compression_rate, self.segment_len
        if rate < 2 or length % rate:
            raise ValueError(f"compression_rate must be at least 2 and divide segment_len {length}: got {rate}")


class CompressiveTransformer(TransformerXL):
    """Layers over [compressed memory, memory, segment]."""

    config: CompressiveTransformerConfig
    has_auxiliary_loss = True

    def __init__(self, config: CompressiveTransformerConfig) -> None:
        super().__init__(config)
        self.window += config.compressed_mem_len

    def add_layers(self) -> None:
        super().add_layers()
        config = self.config
        self.compress = TypedList(Downsample("conv", config.dim, config.compression_rate) for _ in self.layers)

    def remember(self, moving: Mems, mems: Mems) -> tuple[Mems, Tensor | None]:
        """Compressive Transformer, Algorithm 1, and in training the loss of Algorithm 2."""
        new, losses = {}, []
        for layer, f_c in zip(self.layers, self.compress):
            s = moving[layer.name]
            cm, m = mems[layer.name].split([self.config.compressed_mem_len, self.mem_len], dim=1)
            old = falling_out(m, s)
            new_cm = f_c(old)
            if self.training:
                losses.append(reconstruction_loss(layer, s, old, new_cm))
            new[layer.name] = torch.cat([shift(new_cm, cm), shift(s, m)], dim=1)
        return new, self.config.reconstruction_loss_weight * torch.stack(losses).sum(dim=0) if losses else None

    def memory_lengths(self) -> dict[str, int]:
        return {layer.name: self.config.compressed_mem_len + self.mem_len for layer in self.layers}

    def memory_reach(self) -> int:
        tokens = self.mem_len + self.config.compression_rate * self.config.compressed_mem_len
        return len(self.layers) * -(-tokens // self.segment_len)

    def idle_without_a_whole_segment(self) -> Iterable[nn.Parameter]:
        return self.compress.parameters()


def falling_out(memory_BMD: Tensor, segment_BTD: Tensor) -> Tensor:
    """The states (B, T, D) that leave the memory when a segment of T states moves in."""
    length = segment_BTD.size(1)
    if memory_BMD.size(1) >= length:
        return memory_BMD[:, :length].detach()
    return torch.cat([memory_BMD, segment_BTD], dim=1)[:, :length].detach()


def reconstruction_loss(
    layer: TransformerXLLayer, segment_BTD: Tensor, old_BMD: Tensor, compressed_BCD: Tensor
) -> Tensor:
    """Compressive Transformer, Algorithm 2: what compression changes in what a layer attends to, (B,).

    The mean squared difference between attention to the compressed states and attention to those that they were made
    from, by content alone (no positions, neither u nor v). Gradients go to ``compressed`` only: all else is detached,
    the layer's weights included. In half precision the mean is of float32, since a sample size times it would overflow.
    """
    attention, length = layer.attention, old_BMD.size(1)
    precise = torch.promote_types(compressed_BCD.dtype, torch.float32)

    def projected(x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = x_BTD if attention.norm is None else _frozen(attention.norm, x_BTD)
        return split_qkv(_frozen(attention.qkv, normed), attention.heads)

    with torch.no_grad():
        q, k, v = projected(torch.cat([old_BMD, segment_BTD], dim=1))
        # A copy, since backward needs the queries alone.
        q = q[:, :, length:].clone()
        by_old = F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length])
    _, k, v = projected(compressed_BCD)
    by_compressed = F.scaled_dot_product_attention(q, k, v)
    return (by_compressed.to(precise) - by_old.to(precise)).square().mean(dim=(1, 2, 3))


def _frozen(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)`` without gradients of its parameters."""
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return torch.func.functional_call(module, parameters, (x,))
