"""``retina_lm``: near tokens fine and far tokens coarse (Multi-scale Transformer LMs, Section 3.4, Listing 3).

In every layer, some heads see near tokens one by one and others see far ones in blocks.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.decoding.retina import RetinaState
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.choices import Downsampler
from fairseq_ms.lm.config import LanguageModelConfig, layer_config, require
from fairseq_ms.lm.scales import retina_scales
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.multiscale.retina import RetinaLayer
from fairseq_ms.modules.typed_list import TypedList
from fairseq_ms.ops.recompute import checkpointed
from fairseq_ms.ops.window_layout import HeadGroup, Layouts


@dataclass
class RetinaConfig(LanguageModelConfig):
    """Flags of ``retina_lm``."""

    decoder_layers: int = field(default=12, metadata={"help": "number of layers"})
    scale_windows: str = field(
        default="1x=0:8,4x=8:256,16x=256:512",
        metadata={"help": "attention window of each scale k as kx=near:far in tokens, near at least k - 1"},
    )
    scale_heads: Optional[str] = field(
        default=None,
        metadata={"help": "attention heads of each scale as SCALEx=HEADS (default: split evenly)"},
    )
    window_overlap: ChoiceEnum(["forbid", "allow"]) = field(  # type: ignore[valid-type]
        default="forbid",
        metadata={"help": "whether a window may begin before the finer one ends (last row of the paper's Table 4)"},
    )
    downsampler: Downsampler = field(default="avg", metadata={"help": "how tokens are pooled into blocks"})


def head_groups(cfg: Any) -> list[HeadGroup]:
    """The heads by scale; raises UsageError when windows or heads break a rule."""
    overlap = str(getattr(cfg, "window_overlap", "forbid")) == "allow"
    heads = getattr(cfg, "scale_heads", None)
    scales = retina_scales(cfg.scale_windows, heads, cfg.decoder_attention_heads, overlap)
    return [HeadGroup(scale.factor, scale.near, scale.far, scale.heads) for scale in scales]


class RetinaDecoder(Decoder):
    """Layers over token positions, each of which looks at all scales of its input."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.groups = head_groups(cfg)
        config, downsampler = layer_config(cfg), str(getattr(cfg, "downsampler", "avg"))
        self.layers = TypedList(RetinaLayer(config, self.groups, downsampler) for _ in range(cfg.decoder_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.checkpoint = config.checkpoint

    def features(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        attention_masks = self._masks(tokens_BT)
        for layer in self.layers:
            # Downsampled to all scales, and attended to through each scale's window.
            if self.checkpoint:
                x_BTD = checkpointed(layer, x_BTD, attention_masks)
            else:
                x_BTD = layer(x_BTD, attention_masks)
        return self.norm(x_BTD)

    def _masks(self, tokens_BT: Tensor) -> Layouts:
        return Layouts(self.groups, tokens_BT.size(1), tokens_BT.device)

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By scale k, the keys and values that its heads in the last layer look at, (B, T // k, 2 * N * H)."""
        x_BTD, attention_masks = self.embed(tokens_BT), self._masks(tokens_BT)
        *first, last = list(self.layers)
        for layer in first:
            x_BTD = layer(x_BTD, attention_masks)
        return dict(zip((group.factor for group in self.groups), last.attention.keys_and_values(x_BTD)))

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        return RetinaState(self.embed, list(self.layers), self.norm, batch_size)


@register_model("retina_lm", dataclass=RetinaConfig)
class RetinaLanguageModel(LanguageModel):
    """Near tokens fine and far tokens coarse, by heads (Multi-scale Transformer LMs, Section 3.4)."""

    decoder_class = RetinaDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        require(cfg.decoder_layers > 0, f"--decoder-layers must be at least 1: got {cfg.decoder_layers}")
        head_groups(cfg)
