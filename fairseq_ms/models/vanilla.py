"""``vanilla_lm``: the papers' baseline, one stack of layers that see all tokens before them, or those in a window."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models import register_model

from fairseq_ms import core
from fairseq_ms.lm.base import BaseLanguageModel
from fairseq_ms.lm.choices import option
from fairseq_ms.lm.config import OneStackFlags, model_settings, require
from fairseq_ms.models.retina import scales_of


@dataclass
class VanillaFlags(OneStackFlags):
    """Flags of ``vanilla_lm``."""

    decoder_layers: int = option(12, "number of layers", least=1)
    scale_windows: Optional[str] = option(
        None,
        "attention windows at 1x, in tokens, as 1x=0:64, 1x=0:8*2,1x=0:*4 (heads after *, an open end sees all tokens) "
        "or 1x=0:128|1x=0: (layers take turns); default: all tokens",
    )


@register_model("vanilla_lm", dataclass=VanillaFlags)
class VanillaLanguageModel(BaseLanguageModel):
    """Single-scale pre-LN transformer language model, the papers' baseline.

    Multi-scale Transformer LMs, Section 4.2.
    """

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.LanguageModel:
        """With ``--scale-windows``, a retina of the single scale 1x."""
        settings = model_settings(cfg, source_dictionary, target_dictionary)
        if cfg.scale_windows:
            scales = scales_of(cfg)
            rule = "--scale-windows of vanilla_lm must have the single scale 1x"
            require({scale.factor for turn in scales for scale in turn} == {1}, f"{rule}: got {cfg.scale_windows!r}")
            return core.Retina(core.RetinaConfig(layers=cfg.decoder_layers, scales=scales, **settings))
        return core.Vanilla(core.VanillaConfig(layers=cfg.decoder_layers, **settings))
