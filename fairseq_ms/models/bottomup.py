"""``multiscale_bottomup``: from fine to coarse, then one aggregation layer (``core/bottomup.py``)."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models import register_model

from fairseq_ms import core
from fairseq_ms.lm.base import BaseLanguageModel
from fairseq_ms.lm.choices import Downsampler, option
from fairseq_ms.lm.config import MemorylessFlags, model_settings
from fairseq_ms.lm.scales import layer_scales, with_heads


@dataclass
class BottomUpFlags(MemorylessFlags):
    """Flags of ``multiscale_bottomup``."""

    scale_layers: str = option(
        "16x=8,4x=9,1x=9", "number of layers at each scale as SCALEx=LAYERS, beside the aggregation layer"
    )
    scale_heads: Optional[str] = option(
        None, "heads of the aggregation layer for each coarse scale as SCALEx=HEADS (default: evenly)"
    )
    downsampler: Downsampler = option("avg", "how positions are pooled into blocks")
    aggregation_gate: bool = option(
        False, "multiply what the aggregation's attention adds by tanh(g), where g is learned from 0 on"
    )


@register_model("multiscale_bottomup", dataclass=BottomUpFlags)
class BottomUpLanguageModel(BaseLanguageModel):
    """Fine to coarse, then one aggregation layer (Multi-scale Transformer LMs, Section 3.3)."""

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.LanguageModel:
        settings = model_settings(cfg, source_dictionary, target_dictionary)
        finest, *coarse = layer_scales(cfg.scale_layers)
        scales = finest, *with_heads(coarse, cfg.scale_heads)
        own = {"downsampler": str(cfg.downsampler), "aggregation_gate": cfg.aggregation_gate}
        return core.BottomUp(core.BottomUpConfig(scales=scales, **own, **settings))
