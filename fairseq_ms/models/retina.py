"""``retina_lm``: near tokens fine and far tokens coarse (``core/retina.py``)."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models import register_model

from fairseq_ms import core
from fairseq_ms.lm.base import BaseLanguageModel
from fairseq_ms.lm.choices import Downsampler, WindowOverlap, option
from fairseq_ms.lm.config import OneStackFlags, model_settings
from fairseq_ms.lm.scales import Scales, window_scales


@dataclass
class RetinaFlags(OneStackFlags):
    """Flags of ``retina_lm``."""

    decoder_layers: int = option(12, "number of layers", least=1)
    scale_windows: str = option(
        "1x=0:8,4x=8:256,16x=256:512",
        "attention windows of each scale k as kx=near:far in tokens, multiples of k from k on, or kx=near: for an open "
        "end, with *HEADS where heads are not shared evenly, as 1x=0:8*2,1x=0:*4; layers take several in turns, as "
        "1x=0:128|1x=0:",
    )
    scale_heads: Optional[str] = option(None, "attention heads of each scale as SCALEx=HEADS (default: split evenly)")
    window_overlap: WindowOverlap = option(
        "forbid", "whether a window may begin before the finer one ends (last row of the paper's Table 4)"
    )
    downsampler: Downsampler = option("avg", "how tokens are pooled into blocks")


def scales_of(cfg: Any) -> tuple[Scales, ...]:
    """The windows and heads that layers take in turns; raises UsageError when they break a rule."""
    overlap = str(getattr(cfg, "window_overlap", "forbid")) == "allow"
    return window_scales(cfg.scale_windows, getattr(cfg, "scale_heads", None), overlap)


@register_model("retina_lm", dataclass=RetinaFlags)
class RetinaLanguageModel(BaseLanguageModel):
    """Near tokens fine and far tokens coarse, by heads (Multi-scale Transformer LMs, Section 3.4)."""

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.LanguageModel:
        settings = model_settings(cfg, source_dictionary, target_dictionary)
        own = {"layers": cfg.decoder_layers, "scales": scales_of(cfg), "downsampler": str(cfg.downsampler)}
        return core.Retina(core.RetinaConfig(**own, **settings))
