"""Cached decoding of the Compressive Transformer, whose segments also leave compressed states behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairseq_ms.core.streaming.compression import falling_out
from fairseq_ms.core.streaming.layer import shift
from fairseq_ms.core.streaming.memory import Mems
from fairseq_ms.decoding.transformer_xl import TransformerXLState

if TYPE_CHECKING:
    from fairseq_ms.models.compressive_transformer import CompressiveTransformerDecoder


class CompressiveTransformerState(TransformerXLState):
    """A cache a layer, behind the compressed memory and the memory."""

    decoder: CompressiveTransformerDecoder

    def past(self, index: int) -> Tensor:
        return torch.cat([self.mems[f"compressed{index}"], self.mems[f"layer{index}"]], dim=1)

    def end(self) -> Mems:
        mems = super().end()
        for index, (layer, compress) in enumerate(zip(self.layers, self.decoder.compress)):
            compressed = compress(falling_out(self.mems[f"layer{index}"], layer.inputs_BTD))
            mems[f"compressed{index}"] = shift(compressed, self.mems[f"compressed{index}"])
        return mems
