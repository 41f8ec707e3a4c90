"""``vanilla_lm``: the papers' baseline, one stack of layers that see all tokens before them, or those in a window."""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.models import register_model
from torch import Tensor

from fairseq_ms.decoding.stack import StackState
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.config import LanguageModelConfig, layer_config, require
from fairseq_ms.lm.scales import window_scales
from fairseq_ms.models.retina import RetinaDecoder
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.transformer import TransformerStack


@dataclass
class VanillaConfig(LanguageModelConfig):
    """Flags of ``vanilla_lm``."""

    decoder_layers: int = field(default=12, metadata={"help": "number of layers"})
    scale_windows: Optional[str] = field(
        default=None,
        metadata={"help": "attention window as 1x=near:far in tokens, such as 1x=0:64 (default: all tokens)"},
    )


class VanillaDecoder(Decoder):
    """Layers over token positions with full attention."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.stack = TransformerStack(layer_config(cfg), cfg.decoder_layers)

    def features(self, tokens_BT: Tensor) -> Tensor:
        return self.stack(self.embed(tokens_BT))

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By the scale 1, the features of all positions, (B, T, D)."""
        return {1: self.features(tokens_BT)}

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        return StackState(self.embed, self.stack, batch_size, min(capacity, self.positions))


@register_model("vanilla_lm", dataclass=VanillaConfig)
class VanillaLanguageModel(LanguageModel):
    """Single-scale pre-LN transformer language model, the papers' baseline.

    Multi-scale Transformer LMs, Section 4.2.
    """

    decoder_class = VanillaDecoder

    @classmethod
    def decoder_for(cls, cfg: Any) -> type[Decoder]:
        """With ``--scale-windows``, attention is local: a retina of the single scale 1x."""
        return RetinaDecoder if cfg.scale_windows else VanillaDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        require(cfg.decoder_layers > 0, f"--decoder-layers must be at least 1: got {cfg.decoder_layers}")
        if cfg.scale_windows:
            require(
                len(window_scales(cfg.scale_windows)) == 1,
                f"--scale-windows of vanilla_lm must have the single scale 1x: got {cfg.scale_windows!r}",
            )
