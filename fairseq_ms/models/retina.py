"""``retina_lm`` and ``vanilla_lm``: one stack of layers at the scale of tokens (Section 3.4, Listing 3).

In the retina model every layer sees near tokens one by one and far ones in blocks, by different heads; the
vanilla model sees all of them one by one, or those in a window.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.config import LanguageModelConfig, layer_config, require
from fairseq_ms.lm.scales import retina_scales, window_scales
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.kv_cache import CannotTruncate, DecodingState, StackState, reorder_all
from fairseq_ms.modules.multiscale.local_attention import LocalAttention
from fairseq_ms.modules.pooling import DOWNSAMPLERS
from fairseq_ms.modules.transformer import TransformerStack
from fairseq_ms.ops.window_layout import HeadGroup, Layouts


@dataclass
class VanillaConfig(LanguageModelConfig):
    """Flags of ``vanilla_lm``."""

    decoder_layers: int = field(default=12, metadata={"help": "number of layers"})
    scale_windows: Optional[str] = field(
        default=None,
        metadata={"help": "attention window as 1x=near:far in tokens, such as 1x=0:64 (default: all tokens)"},
    )


@dataclass
class RetinaConfig(LanguageModelConfig):
    """Flags of ``retina_lm``."""

    decoder_layers: int = field(default=12, metadata={"help": "number of layers"})
    scale_windows: str = field(
        default="1x=0:8,4x=8:256,16x=256:512",
        metadata={"help": "attention window of each scale as SCALEx=near:far in tokens"},
    )
    scale_heads: Optional[str] = field(
        default=None,
        metadata={"help": "attention heads of each scale as SCALEx=HEADS (default: split evenly)"},
    )
    window_overlap: ChoiceEnum(["forbid", "allow"]) = field(  # type: ignore[valid-type]
        default="forbid",
        metadata={"help": "whether a window may begin before the finer one ends (last row of the paper's Table 4)"},
    )
    downsampler: ChoiceEnum(list(DOWNSAMPLERS)) = field(  # type: ignore[valid-type]
        default="avg", metadata={"help": "how tokens are pooled into blocks"}
    )


class LocalState(DecodingState):
    """The state of a stack of local attention layers; what left the windows is forgotten."""

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.caches[0].length

    def reorder(self, order: Tensor) -> None:
        reorder_all(self.caches, order, self.caches[0].batch_size)

    def truncate(self, length: int) -> None:
        if length != self.length:
            raise CannotTruncate


def head_groups(cfg: Any) -> list[HeadGroup]:
    """The heads by scale; raises UsageError when windows or heads break a rule."""
    overlap = str(getattr(cfg, "window_overlap", "forbid")) == "allow"
    heads = getattr(cfg, "scale_heads", None)
    scales = retina_scales(cfg.scale_windows, heads, cfg.decoder_attention_heads, overlap)
    return [HeadGroup(scale.factor, scale.near, scale.far, scale.heads) for scale in scales]


class SingleStackDecoder(Decoder):
    """Layers over token positions, with full attention or with attention through windows."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.groups = head_groups(cfg) if cfg.scale_windows else None
        layers = layer_config(cfg)

        def local_attention() -> nn.Module:
            downsampler = str(getattr(cfg, "downsampler", "avg"))
            assert self.groups is not None
            return LocalAttention(layers.dim, self.groups, downsampler, layers.attention_dropout, layers.recompute)

        self.stack = TransformerStack(layers, cfg.decoder_layers, local_attention if self.groups else None)

    def features(self, tokens_BT: Tensor, state: DecodingState | None = None) -> Tensor:
        mask = Layouts(self.groups, tokens_BT.size(1), tokens_BT.device) if self.groups else None
        return self.stack(self.embed(tokens_BT), mask, _caches(state))

    def step(self, tokens_B1: Tensor, state: DecodingState) -> Tensor:
        return self.stack(self.embed(tokens_B1, start=state.length), None, _caches(state))

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By scale k, what its heads in the last layer look at: keys and values of all blocks, (B, T // k, 2 * N * H).

        Without scales, the features of all positions, (B, T, D).
        """
        if not self.groups:
            return {1: self.features(tokens_BT)}
        x_BTD, mask = self.embed(tokens_BT), Layouts(self.groups, tokens_BT.size(1), tokens_BT.device)
        *first, last = self.stack.layers
        for layer in first:
            x_BTD = layer(x_BTD, mask)
        norm = last.attention_norm if last.normalize_before else None
        pairs = last.attention.keys_and_values(x_BTD, norm)  # type: ignore[union-attr, operator]
        return dict(zip((group.factor for group in self.groups), pairs))

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        caches = self.stack.new_caches(batch_size, min(capacity, self.positions), self.like())
        return LocalState(caches) if self.groups else StackState(caches)


def _caches(state: Any) -> Any:
    return None if state is None else state.caches


@register_model("vanilla_lm", dataclass=VanillaConfig)
class VanillaLanguageModel(LanguageModel):
    """Single-scale pre-LN transformer language model, the papers' baseline (Section 4.2)."""

    decoder_class = SingleStackDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        require(cfg.decoder_layers > 0, f"--decoder-layers must be at least 1: got {cfg.decoder_layers}")
        if cfg.scale_windows:
            require(
                len(window_scales(cfg.scale_windows)) == 1,
                f"--scale-windows of vanilla_lm must have the single scale 1x: got {cfg.scale_windows!r}",
            )


@register_model("retina_lm", dataclass=RetinaConfig)
class RetinaLanguageModel(LanguageModel):
    """Near tokens fine and far tokens coarse, by heads (Section 3.4)."""

    decoder_class = SingleStackDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        require(cfg.decoder_layers > 0, f"--decoder-layers must be at least 1: got {cfg.decoder_layers}")
        head_groups(cfg)
