"""``multiscale_bottomup``: from fine to coarse, then one aggregation layer.

Multi-scale Transformer LMs, Section 3.3, Listing 2.

Every coarse scale pools the output of the finer one. Block i of scale k covers positions ik .. (i+1)k-1 and is
used from its last position on; an incomplete last block is used by nobody.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.decoding.bottomup import BottomUpState
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.choices import Downsampler
from fairseq_ms.lm.config import LanguageModelConfig, layer_config
from fairseq_ms.lm.scales import Scales, aggregated_scales
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.multiscale.bottomup import AggregationLayer, BottomUpScale
from fairseq_ms.modules.transformer import TransformerStack
from fairseq_ms.modules.typed_list import TypedList
from fairseq_ms.ops.idle import keep_in_graph


@dataclass
class BottomUpConfig(LanguageModelConfig):
    """Flags of ``multiscale_bottomup``."""

    scale_layers: str = field(
        default="16x=8,4x=9,1x=9",
        metadata={"help": "number of layers at each scale as SCALEx=LAYERS, beside the aggregation layer"},
    )
    scale_heads: Optional[str] = field(
        default=None,
        metadata={"help": "heads of the aggregation layer for each coarse scale as SCALEx=HEADS (default: evenly)"},
    )
    downsampler: Downsampler = field(default="avg", metadata={"help": "how positions are pooled into blocks"})


def fine_to_coarse(cfg: Any) -> Scales:
    """The scales of the model; raises UsageError when ``--scale-layers`` or ``--scale-heads`` breaks a rule."""
    return aggregated_scales(cfg.scale_layers, cfg.scale_heads, cfg.decoder_attention_heads)


class BottomUpDecoder(Decoder):
    """Coarse scales one above the other, then the aggregation layer and the layers at 1x."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        config = layer_config(cfg)
        scales = fine_to_coarse(cfg)
        self.coarse = TypedList(
            BottomUpScale(scale.factor, scale.factor // finer, scale.layers, config, str(cfg.downsampler))
            for scale, finer in zip(scales.coarse, scales.factors)
        )
        self.aggregate = AggregationLayer(config, {scale.factor: scale.heads for scale in scales.coarse})
        self.stack = TransformerStack(config, scales.finest.layers)

    def features(self, tokens_BT: Tensor) -> Tensor:
        return self.representations(tokens_BT)[1]

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By scale k, what its layers give at finished blocks: (B, T // k, D)."""
        x_BTD = self.embed(tokens_BT)
        representations: dict[int, Tensor] = {}
        out_BCD = x_BTD
        for scale in self.coarse:
            out_BCD = scale(out_BCD)
            representations[scale.factor] = out_BCD
        out_BTD = self.aggregate(x_BTD, list(representations.values()))
        out_BTD = self.stack(out_BTD)
        if self.training and (idle := self._idle(representations)):
            out_BTD = keep_in_graph(out_BTD, idle)
        return {1: out_BTD, **representations}

    def _idle(self, representations: dict[int, Tensor]) -> list[nn.Parameter]:
        """The parameters that too short a batch leaves without work."""
        return [
            parameter
            for blocks, *modules in zip(representations.values(), self.coarse, self.aggregate.attention.coarse)
            if blocks.size(1) == 0
            for module in modules
            for parameter in module.parameters()
        ]

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        return BottomUpState(
            self.embed, list(self.coarse), self.aggregate, self.stack, batch_size, min(capacity, self.positions)
        )


@register_model("multiscale_bottomup", dataclass=BottomUpConfig)
class BottomUpLanguageModel(LanguageModel):
    """Fine to coarse, then one aggregation layer (Multi-scale Transformer LMs, Section 3.3)."""

    decoder_class = BottomUpDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        fine_to_coarse(cfg)
