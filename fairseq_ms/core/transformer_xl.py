"""Transformer-XL: segments that see the states of the segments before them (Transformer-QL, Figure 3)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fairseq_ms.core.layers import TypedList
from fairseq_ms.core.stream_state import WHOLE, Mems, Pasts
from fairseq_ms.core.streaming import StreamingConfig, StreamingModel


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(StreamingConfig):
    """Sizes of a ``TransformerXL``.

    Attributes:
        layers: number of layers
    """

    layers: int = 8


class TransformerXL(StreamingModel):
    """Layers over [memory, segment]; the memory of a layer is that of its input."""

    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.add_layers()
        self.reset_parameters()

    def add_layers(self) -> None:
        """Build the layers."""
        depth = self.config.layers
        self.layers = TypedList(self.make_layer(f"layer{index}", depth) for index in range(depth))

    def forward_segment(
        self, x_BTD: Tensor, mems: Mems, positions: Tensor, pasts: Pasts = WHOLE
    ) -> tuple[Tensor, Mems]:
        """Transformer-QL, Figure 3, lines 7 to 10."""
        s, moving = x_BTD, {}
        for layer in self.layers:
            moving[layer.name] = s
            s = layer(s, pasts.get(layer.name), mems[layer.name], positions)
        return s, moving

    def memory_lengths(self) -> dict[str, int]:
        return {layer.name: self.mem_len for layer in self.layers}

    def memory_reach(self) -> int:
        return len(self.layers) * -(-self.mem_len // self.segment_len)
