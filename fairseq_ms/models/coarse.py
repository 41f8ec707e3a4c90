"""``coarse_lm``: a language model over k-grams that predicts the next one's bag of words (``core/coarse.py``)."""

from dataclasses import dataclass
from typing import Any

from fairseq.models import register_model
from torch import Tensor

from fairseq_ms import core
from fairseq_ms.core.ops.recompute import keep_in_graph
from fairseq_ms.lm.base import BaseLanguageModel
from fairseq_ms.lm.choices import Downsampler, option
from fairseq_ms.lm.config import MemorylessFlags, model_settings, require
from fairseq_ms.lm.scales import layer_scales


@dataclass
class CoarseFlags(MemorylessFlags):
    """Flags of ``coarse_lm``."""

    scale_layers: str = option("4x=12", "the scale and its number of layers as SCALEx=LAYERS, such as 4x=12")
    downsampler: Downsampler = option("avg", "how tokens are pooled into blocks")


@register_model("coarse_lm", dataclass=CoarseFlags)
class CoarseLanguageModel(BaseLanguageModel):
    """Predicts the next k-gram's bag of words (Multi-scale Transformer LMs, Section 6.2)."""

    bag_of_words_weight = None

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.LanguageModel:
        settings = model_settings(cfg, source_dictionary, target_dictionary)
        scale, *others = layer_scales(cfg.scale_layers)
        rule = "--scale-layers of coarse_lm must have a single scale such as 4x=12"
        require(not others, f"{rule}: got {cfg.scale_layers!r}")
        return core.CoarseLM(core.CoarseLMConfig(scale=scale, downsampler=str(cfg.downsampler), **settings))

    def forward_blocks(
        self, src_tokens: Tensor, features_only: bool, per_block: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> with ``per_block``, the logits of every block once, (B, C, V), where C is ceil(T / k).

        ``extra["scale"]`` is k. With ``features_only``, features stand in for the logits.
        """
        decoder = self.decoder
        x_BCD = decoder.core.block_features(src_tokens)
        extra = {"attn": None, "memory": None, "scale": decoder.core.factor}
        if not features_only:
            return decoder.output_layer(x_BCD), extra
        # Whose matrix the criterion multiplies with: torch may look here for what is used.
        return keep_in_graph(x_BCD, decoder.project.parameters()), extra
