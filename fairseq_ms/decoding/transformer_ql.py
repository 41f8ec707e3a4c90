"""Cached decoding of Transformer-QL: a coarse scale moves on whenever a block of the finer one is complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fairseq_ms.core.cache import Reorderable
from fairseq_ms.core.streaming.layer import TransformerXLLayer, shift
from fairseq_ms.core.streaming.memory import Memory, Mems
from fairseq_ms.core.streaming.scales import ScaleLengths, accumulate, compress
from fairseq_ms.decoding.streaming import StreamState
from fairseq_ms.decoding.transformer_xl import CachedLayer

if TYPE_CHECKING:
    from fairseq_ms.models.transformer_ql import TransformerQLDecoder


class CachedLayers:
    """The layers of a scale, or those behind the scales, over a segment that comes in pieces."""

    def __init__(self, name: str, layers: Iterable[TransformerXLLayer]) -> None:
        self.layers = [CachedLayer(layer) for layer in layers]
        self.names = [f"{name}.layer{index}" for index in range(len(self.layers))]

    def begin(self, mems: Mems, segment: int, positions_PD: Tensor) -> None:
        for name, layer in zip(self.names, self.layers):
            layer.begin(mems[name], segment, positions_PD)

    def __call__(self, s_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            s_BTD = layer(s_BTD)
        return s_BTD

    def end(self, mems: Mems, shift_len: int) -> Mems:
        return {n: shift(layer.inputs_BTD[:, :shift_len], mems[n]) for n, layer in zip(self.names, self.layers)}

    def reorder(self, order: Tensor) -> None:
        for layer in self.layers:
            layer.reorder(order)


class CachedScale:
    """A scale over a segment that comes in pieces.

    Attributes:
        outputs_BTD: those that are remembered and those of the segment
        read: how many of the finer scale's have been compressed or left out
    """

    def __init__(self, lengths: ScaleLengths, layers: Iterable[TransformerXLLayer], norm: nn.Module) -> None:
        self.name = f"scale{lengths.factor}"
        self.lengths = lengths
        self.layers = CachedLayers(self.name, layers)
        self.norm = norm

    def begin(self, mems: Mems, positions_PD: Tensor) -> None:
        self.layers.begin(mems, self.lengths.segment, positions_PD)
        self.outputs_BTD = mems[f"{self.name}.output"]
        self.read = self.lengths.skip

    def __call__(self, s_BTD: Tensor) -> None:
        if s_BTD.size(1):
            self.outputs_BTD = torch.cat([self.outputs_BTD, self.norm(self.layers(s_BTD))], dim=1)

    def blocks(self, finer_BTD: Tensor, kind: str) -> Tensor:
        """The inputs that the finer scale's outputs complete by now and that were not before, (B, C, D)."""
        blocks_BCD = compress(finer_BTD[:, self.read :], self.lengths.ratio, kind)
        self.read += self.lengths.ratio * blocks_BCD.size(1)
        return blocks_BCD

    def end(self, mems: Mems) -> Mems:
        output = f"{self.name}.output"
        moving_BTD = self.outputs_BTD[:, self.lengths.trail :][:, : self.lengths.shift]
        return {**self.layers.end(mems, self.lengths.shift), output: shift(moving_BTD, mems[output])}

    def reorder(self, order: Tensor) -> None:
        self.layers.reorder(order)
        self.outputs_BTD = self.outputs_BTD.index_select(0, order)


class TransformerQLState(StreamState):
    """A cache a layer, and every scale's outputs."""

    decoder: TransformerQLDecoder

    def __init__(self, decoder: TransformerQLDecoder, start: Memory) -> None:
        parts = zip(decoder.lengths, decoder.scales, decoder.scale_norms)
        self.scales = [CachedScale(lengths, layers, norm) for lengths, layers, norm in parts]
        self.final = CachedLayers("final", decoder.final)
        super().__init__(decoder, start)

    def begin(self) -> None:
        decoder = self.decoder
        positions_PD = decoder.sinusoids()
        for scale in self.scales:
            scale.begin(self.mems, positions_PD)
        self.final.begin(self.mems, decoder.segment_len, positions_PD)

    def advance(self, x_BTD: Tensor) -> Tensor:
        self.scales[0](x_BTD)
        for finer, scale in zip(self.scales, self.scales[1:]):
            scale(scale.blocks(finer.outputs_BTD, self.decoder.compression))
        outputs, lengths = [scale.outputs_BTD for scale in self.scales], self.decoder.lengths
        return self.final(accumulate(outputs, lengths, x_BTD.size(1), self.done))

    def end(self) -> Mems:
        if not self.decoder.mem_len:
            return self.mems
        mems = self.final.end(self.mems, self.decoder.segment_len)
        for scale in self.scales:
            mems.update(scale.end(self.mems))
        return mems

    def parts(self) -> Iterable[Reorderable]:
        return [*self.scales, self.final]
