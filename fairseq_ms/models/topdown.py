"""``multiscale_topdown``: from coarse to fine (Multi-scale Transformer LMs, Section 3.2, Listing 1).

Layers over pooled tokens at the coarsest scale come first; every finer scale joins its own pooled tokens with
what the coarser one gave. Blocks are right-aligned (``modules/pooling.py``), so every position is predicted.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.models import register_model
from omegaconf import II
from torch import Tensor

from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.decoding.topdown import TopDownState
from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.choices import Downsampler
from fairseq_ms.lm.config import LanguageModelConfig, layer_config, require
from fairseq_ms.lm.scales import Scale, layer_scales
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.multiscale.topdown import TopDownScale
from fairseq_ms.modules.typed_list import TypedList


@dataclass
class TopDownConfig(LanguageModelConfig):
    """Flags of ``multiscale_topdown``."""

    scale_layers: str = field(
        default="64x=7,16x=7,4x=8,1x=8", metadata={"help": "number of layers at each scale as SCALEx=LAYERS"}
    )
    downsampler: Downsampler = field(default="avg", metadata={"help": "how tokens are pooled into blocks"})
    bag_of_words_weight: float = field(
        default=0.0,
        metadata={"help": "weight of predicting the next bag of words at all coarse scales (--criterion bag_of_words)"},
    )
    # `fairseq-validate` puts the whole configuration of the criterion here instead of its name.
    criterion: Any = II("criterion._name")  # noqa: RUF009 (fairseq spells defaults taken from elsewhere so)


class TopDownDecoder(Decoder):
    """Scales from coarse to fine; the finest gives the features."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.bag_of_words_weight = float(cfg.bag_of_words_weight)
        layers = layer_config(cfg)
        self.scales: TypedList[TopDownScale] = TypedList()
        coarser: Scale | None = None
        for scale in layer_scales(cfg.scale_layers).coarsest_first:
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

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        memory: Any = None,
        features_only: bool = False,
        bags: bool = False,
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> logits (B, T, V); with ``bags``, also the features of all coarse blocks.

        ``extra["bags"]`` then has, by scale k, features (B, ceil(T / k), D): through the output layer, those of block i
        predict the bag of words of the targets ik .. (i+1)k-1 (Multi-scale Transformer LMs, Section 6.2).
        """
        if not bags:
            return super().forward(src_tokens, src_lengths, memory, features_only)
        features = self.decoder.representations(src_tokens)
        return self.decoder.output_layer(features.pop(1)), {"attn": None, "memory": None, "bags": features}

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        scales, weight = layer_scales(cfg.scale_layers), cfg.bag_of_words_weight
        require(weight >= 0.0, f"--bag-of-words-weight must be at least 0: got {weight}")
        require(
            not weight or len(scales) > 1,
            f"--bag-of-words-weight has no effect with the single scale of --scale-layers {cfg.scale_layers}: "
            f"got {weight}",
        )
        if weight:
            criterion = getattr(cfg.criterion, "_name", cfg.criterion)
            require(
                criterion == "bag_of_words",
                f"--bag-of-words-weight needs --criterion bag_of_words to train with: got {weight} and {criterion}",
            )
