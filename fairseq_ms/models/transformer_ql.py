"""``transformer_ql``: Transformer-XL at several scales, for a quadratically long context (Transformer-QL, Figure 2)."""

import logging
from dataclasses import dataclass
from typing import Any

from fairseq.models import register_model

from fairseq_ms import core
from fairseq_ms.lm.choices import Compression, option, probability
from fairseq_ms.lm.config import of_core, refuse_given
from fairseq_ms.lm.scales import layer_scales
from fairseq_ms.lm.streaming import StreamingFlags, StreamingLanguageModel, streaming_settings

logger = logging.getLogger(__name__)


@dataclass
class TransformerQLFlags(StreamingFlags):
    """Flags of ``transformer_ql``; with ``--mem-len 0`` it is the paper's Multi-scale Transformer."""

    scale_layers: str = option("1x=3,2x=3", "number of layers at each scale as SCALEx=LAYERS")
    output_layers: int = option(2, "number of layers after the scales are combined", least=0)
    droppath: float = probability(0.0, "probability of training on the coarser scales' outputs alone")
    compression: Compression = option("max", "how states are pooled into those of the next scale")


@register_model("transformer_ql", dataclass=TransformerQLFlags)
class TransformerQLLanguageModel(StreamingLanguageModel):
    """Transformer-QL: a memory at several scales (Transformer-QL, Section 2.3)."""

    def memory_flags(self) -> dict[str, int | str]:
        config = self.decoder.core.config
        assert isinstance(config, core.TransformerQLConfig)
        layers = [f"{scale}={scale.layers}" for scale in config.scales]
        return {**super().memory_flags(), "--scale-layers": ",".join(layers)}

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.LanguageModel:
        settings = streaming_settings(cfg, source_dictionary, target_dictionary)
        own = of_core(cfg, "output_layers", "droppath", "compression")
        return core.TransformerQL(core.TransformerQLConfig(scales=layer_scales(cfg.scale_layers), **own, **settings))

    @classmethod
    def validate(cls, cfg: TransformerQLFlags, task: object) -> None:
        super().validate(cfg, task)
        if not cfg.decoder_normalize_before:
            logger.warning(
                "while the memory is empty, the coarse scales normalise rows of zeros, with very large gradients: set "
                "--decoder-normalize-before, as the paper does, or at least --clip-norm"
            )

    @classmethod
    def refuse_idle(cls, cfg: TransformerQLFlags) -> None:
        super().refuse_idle(cfg)
        if len(layer_scales(cfg.scale_layers)) == 1:
            why = f"with the single scale of --scale-layers {cfg.scale_layers}"
            refuse_given(cls.flags(), cfg, ("droppath", "compression"), why)
