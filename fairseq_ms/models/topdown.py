"""``multiscale_topdown``: from coarse to fine (Multi-scale Transformer LMs, Section 3.2, Listing 1).

Layers over pooled tokens at the coarsest scale come first; every finer scale joins its own pooled tokens with
what the coarser one gave. Blocks are right-aligned (``modules/multiscale/blocks.py``), so every position is predicted.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor

from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.decoding.topdown import TopDownState
from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.config import LanguageModelConfig, layer_config
from fairseq_ms.lm.registry import register_presets
from fairseq_ms.lm.scales import Scale, parse_counts
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.multiscale.topdown import TopDownScale
from fairseq_ms.modules.pooling import DOWNSAMPLERS
from fairseq_ms.modules.typed_list import TypedList


@dataclass
class TopDownConfig(LanguageModelConfig):
    """Flags of ``multiscale_topdown``."""

    scale_layers: str = field(
        default="64x=7,16x=7,4x=8,1x=8", metadata={"help": "number of layers at each scale as SCALEx=LAYERS"}
    )
    downsampler: ChoiceEnum(list(DOWNSAMPLERS)) = field(  # type: ignore[valid-type]
        default="avg", metadata={"help": "how tokens are pooled into blocks"}
    )


def coarse_to_fine(text: str) -> list[Scale]:
    """The scales of ``--scale-layers``, coarsest first; raises UsageError on another form."""
    counts = parse_counts("--scale-layers", text)
    return [Scale(factor, layers) for factor, layers in reversed(counts.items())]


class TopDownDecoder(Decoder):
    """Scales from coarse to fine; the finest gives the features."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        layers = layer_config(cfg)
        scales, coarser = coarse_to_fine(cfg.scale_layers), None
        self.scales: TypedList[TopDownScale] = TypedList()
        for scale in scales:
            ratio = coarser.factor // scale.factor if coarser is not None else None
            self.scales.append(TopDownScale(scale.factor, ratio, scale.layers, layers, str(cfg.downsampler)))
            coarser = scale

    def features(self, tokens_BT: Tensor) -> Tensor:
        return list(self.representations(tokens_BT).values())[-1]

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By scale k, coarsest first, what its layers give at right-aligned blocks: (B, ceil(T / k), D)."""
        x_BTD = self.embed(tokens_BT)
        outputs: dict[int, Tensor] = {}
        out_BCD = None
        for scale in self.scales:
            # Pooled tokens, joined with the upsampled output of the coarser scale.
            out_BCD = scale.inputs(x_BTD, out_BCD)
            out_BCD = scale.stack(out_BCD)
            outputs[scale.factor] = out_BCD
        return outputs

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        return TopDownState(self.embed, list(self.scales), batch_size, min(capacity, self.positions))


@register_model("multiscale_topdown", dataclass=TopDownConfig)
class TopDownLanguageModel(LanguageModel):
    """Coarse to fine (Multi-scale Transformer LMs, Section 3.2)."""

    decoder_class = TopDownDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        coarse_to_fine(cfg.scale_layers)


_CC_NEWS = {"decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 16}
_ALLOCATIONS = [
    (16, 12, 6, 1),
    (10, 10, 8, 5),
    (8, 8, 7, 7),
    (7, 7, 8, 8),
    (5, 5, 9, 9),
    (3, 3, 10, 10),
    (2, 2, 11, 11),
    (1, 1, 12, 12),
]


def _four_scales(layers: tuple[int, ...]) -> str:
    return ",".join(f"{factor}x={count}" for factor, count in zip((64, 16, 4, 1), layers))


# Table 2 (CC-News), Table 3 (WikiText-103) and Table 4 (BookCorpus).
register_presets(
    "multiscale_topdown",
    {
        "ccnews_5_5_6_6": {**_CC_NEWS, "scale_layers": _four_scales((5, 5, 6, 6))},
        "ccnews_5_5_9_9": {**_CC_NEWS, "scale_layers": _four_scales((5, 5, 9, 9))},
        "ccnews_2_4_8_12": {**_CC_NEWS, "scale_layers": _four_scales((2, 4, 8, 12))},
        "wt103_6_12": {"scale_layers": "4x=6,1x=12"},
        "wt103_5_10": {"scale_layers": "4x=5,1x=10"},
        "books_8_12": {"scale_layers": "4x=8,1x=12"},
        "books_4_8_12": {"scale_layers": "16x=4,4x=8,1x=12"},
        "books_2_4_8_12": {"scale_layers": _four_scales((2, 4, 8, 12))},
        **{"books_" + "_".join(map(str, layers)): {"scale_layers": _four_scales(layers)} for layers in _ALLOCATIONS},
        "books_conv_7_7_8_8": {"scale_layers": _four_scales((7, 7, 8, 8)), "downsampler": "conv"},
    },
)
