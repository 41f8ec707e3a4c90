"""``compressive_transformer``: Transformer-XL whose oldest memories are kept in compressed form (Rae et al., 2020)."""

from dataclasses import dataclass
from typing import Any

from fairseq.models import register_model

from fairseq_ms import core
from fairseq_ms.lm.choices import option
from fairseq_ms.lm.config import of_core
from fairseq_ms.lm.streaming import streaming_settings
from fairseq_ms.models.transformer_xl import TransformerXLFlags, TransformerXLLanguageModel


@dataclass
class CompressiveTransformerFlags(TransformerXLFlags):
    """Flags of ``compressive_transformer``."""

    mem_len: int = option(12, "number of states before the segment that every layer remembers", least=0)
    compressed_mem_len: int = option(12, "number of compressed states before those that every layer remembers", least=0)
    compression_rate: int = option(2, "how many states are compressed into one", least=2)
    reconstruction_loss_weight: float = option(
        0.01, "weight of the attention-reconstruction loss, which alone trains the compression", above=0
    )


@register_model("compressive_transformer", dataclass=CompressiveTransformerFlags)
class CompressiveTransformerLanguageModel(TransformerXLLanguageModel):
    """Compressive Transformer: Transformer-XL plus a compressed memory."""

    def memory_flags(self) -> dict[str, int | str]:
        config = self.decoder.core.config
        assert isinstance(config, core.CompressiveTransformerConfig)
        return {**super().memory_flags(), "--compressed-mem-len": config.compressed_mem_len}

    @classmethod
    def core_model(cls, cfg: Any, source_dictionary: Any, target_dictionary: Any) -> core.LanguageModel:
        settings = streaming_settings(cfg, source_dictionary, target_dictionary)
        own = of_core(cfg, "layers", "compressed_mem_len", "compression_rate", "reconstruction_loss_weight")
        return core.CompressiveTransformer(core.CompressiveTransformerConfig(**own, **settings))
