"""``transformer_xl``: segments that see the states of the segments before them (Transformer-QL, Figure 3)."""

from dataclasses import dataclass
from typing import Any

from fairseq.models import register_model

from fairseq_ms import core
from fairseq_ms.lm.choices import option
from fairseq_ms.lm.streaming import StreamingFlags, StreamingLanguageModel, streaming_settings


@dataclass
class TransformerXLFlags(StreamingFlags):
    """Flags of ``transformer_xl``."""

    decoder_layers: int = option(8, "number of layers", least=1)


@register_model("transformer_xl", dataclass=TransformerXLFlags)
class TransformerXLLanguageModel(StreamingLanguageModel):
    """Transformer-XL: segment recurrence and relative positions."""

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.LanguageModel:
        settings = streaming_settings(cfg, source_dictionary, target_dictionary)
        return core.TransformerXL(core.TransformerXLConfig(layers=cfg.decoder_layers, **settings))
