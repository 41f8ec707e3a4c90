"""``multiscale_topdown``: from coarse to fine (``core/topdown.py``)."""

from dataclasses import dataclass
from typing import Any

from fairseq.models import register_model
from omegaconf import II
from torch import Tensor

from fairseq_ms import core
from fairseq_ms.lm.base import BaseLanguageModel
from fairseq_ms.lm.choices import Downsampler, option
from fairseq_ms.lm.config import MemorylessFlags, criterion_of, model_settings, require
from fairseq_ms.lm.scales import layer_scales


@dataclass
class TopDownFlags(MemorylessFlags):
    """Flags of ``multiscale_topdown``."""

    scale_layers: str = option("64x=7,16x=7,4x=8,1x=8", "number of layers at each scale as SCALEx=LAYERS")
    downsampler: Downsampler = option("avg", "how tokens are pooled into blocks")
    bag_of_words_weight: float = option(
        0.0, "weight of predicting the next bag of words at all coarse scales (--criterion bag_of_words)", least=0
    )
    criterion: Any = II("criterion._name")


@register_model("multiscale_topdown", dataclass=TopDownFlags)
class TopDownLanguageModel(BaseLanguageModel):
    """Coarse to fine (Multi-scale Transformer LMs, Section 3.2)."""

    bag_of_words_weight = 0.0

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.LanguageModel:
        settings = model_settings(cfg, source_dictionary, target_dictionary)
        scales = layer_scales(cfg.scale_layers)
        return core.TopDown(core.TopDownConfig(scales=scales, downsampler=str(cfg.downsampler), **settings))

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> BaseLanguageModel:
        model = super().build_model(cfg, task)
        model.bag_of_words_weight = float(cfg.bag_of_words_weight)
        return model

    def forward_blocks(
        self, src_tokens: Tensor, features_only: bool, bags: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> logits (B, T, V); with ``bags``, ``extra["bags"]`` has the features of coarse blocks.

        These are, by scale k, features (B, ceil(T / k), D): through the output layer, those of block i predict the bag
        of words of the targets ik .. (i+1)k-1 (Multi-scale Transformer LMs, Section 6.2).
        """
        features = self.decoder.core.representations(src_tokens)
        x_BTD = features.pop(1)
        extra = {"attn": None, "memory": None, "bags": features}
        return (x_BTD if features_only else self.decoder.output_layer(x_BTD)), extra

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        scales, weight = layer_scales(cfg.scale_layers), cfg.bag_of_words_weight
        require(
            not weight or len(scales) > 1,
            f"--bag-of-words-weight has no effect with the single scale of --scale-layers {cfg.scale_layers}: "
            f"got {weight}",
        )
        require(
            not weight or criterion_of(cfg) == "bag_of_words",
            f"--bag-of-words-weight needs --criterion bag_of_words to train with: got {weight} and {criterion_of(cfg)}",
        )
