"""``retina_lm`` and ``vanilla_lm``: one stack of layers at the scale of tokens (Section 3.4, Listing 3).

In the retina model every layer sees near tokens one by one and far ones in blocks, by different heads; the
vanilla model sees all of them one by one, or those in a window.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.errors import UsageError
from fairseq_ms.models.base import Decoder, LanguageModel
from fairseq_ms.models.config import LanguageModelConfig, layer_config, require
from fairseq_ms.models.presets import register_presets
from fairseq_ms.models.scales import parse_counts, parse_windows
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.layer import TransformerStack
from fairseq_ms.modules.local_attention import LocalAttention
from fairseq_ms.modules.pooling import DOWNSAMPLERS
from fairseq_ms.modules.state import CannotTruncate, DecodingState, StackState
from fairseq_ms.modules.window_layout import HeadGroup, Layouts


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
        for cache in self.caches:
            cache.reorder(order)

    def truncate(self, length: int) -> None:
        if length != self.length:
            raise CannotTruncate


def head_groups(cfg: Any) -> list[HeadGroup]:
    """The heads by scale; raises UsageError when windows or heads break a rule."""
    overlap = str(getattr(cfg, "window_overlap", "forbid")) == "allow"
    windows = parse_windows("--scale-windows", cfg.scale_windows, overlap)
    total = cfg.decoder_attention_heads
    given = getattr(cfg, "scale_heads", None)
    if given is None:
        if total % len(windows):
            raise UsageError(
                f"--decoder-attention-heads must be a multiple of the {len(windows)} scales of --scale-windows "
                f"unless --scale-heads splits them: got {total}"
            )
        heads = {factor: total // len(windows) for factor in windows}
    else:
        heads = parse_counts("--scale-heads", given)
        if heads.keys() != windows.keys():
            raise UsageError(
                f"--scale-heads must name the scales of --scale-windows {cfg.scale_windows!r}: got {given!r}"
            )
        if sum(heads.values()) != total:
            raise UsageError(f"--scale-heads must add up to --decoder-attention-heads {total}: got {given!r}")
    return [HeadGroup(factor, near, far, heads[factor]) for factor, (near, far) in windows.items()]


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
            windows = parse_windows("--scale-windows", cfg.scale_windows)
            require(
                len(windows) == 1,
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


_CC_NEWS = {"decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 16}

# Table 2 (CC-News), Table 3 (WikiText-103) and Table 4 (BookCorpus).
register_presets(
    "vanilla_lm",
    {
        "ccnews_10": {**_CC_NEWS, "decoder_layers": 10},
        "ccnews_12": {**_CC_NEWS, "decoder_layers": 12},
        "ccnews_14": {**_CC_NEWS, "decoder_layers": 14},
        "wt103_16": {"decoder_layers": 16},
        "books_12": {"decoder_layers": 12},
        "books_14": {"decoder_layers": 14},
        "books_30_narrow": {
            "decoder_layers": 30,
            "decoder_embed_dim": 256,
            "decoder_ffn_embed_dim": 1024,
            "decoder_attention_heads": 4,
        },
        "books_20_narrow": {
            "decoder_layers": 20,
            "decoder_embed_dim": 512,
            "decoder_ffn_embed_dim": 2048,
            "decoder_attention_heads": 8,
        },
        **{
            f"books_12_window{far}": {"decoder_layers": 12, "scale_windows": f"1x=0:{far}"}
            for far in (8, 16, 64, 128, 256)
        },
    },
)

register_presets(
    "retina_lm",
    {
        "wt103_16": {"decoder_layers": 16},
        "books_12_8_256_512": {"decoder_layers": 12, "scale_windows": "1x=0:8,4x=8:256,16x=256:512"},
        "books_12_16_256_512": {"decoder_layers": 12, "scale_windows": "1x=0:16,4x=16:256,16x=256:512"},
        "books_12_128_256_512": {
            "decoder_layers": 12,
            "scale_windows": "1x=0:128,4x=64:256,16x=128:512",
            "window_overlap": "allow",
        },
    },
)
