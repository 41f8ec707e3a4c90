"""``multiscale_topdown``: from coarse to fine (Section 3.2, Figure 1a, Listing 1).

Layers over pooled tokens at the coarsest scale come first; every finer scale joins its own pooled tokens with
what the coarser one gave. Blocks are right-aligned (``modules/blocks.py``), so every position is predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.models.base import Decoder, LanguageModel
from fairseq_ms.models.config import LanguageModelConfig, layer_config
from fairseq_ms.models.presets import register_presets
from fairseq_ms.models.scales import Scale, parse_counts
from fairseq_ms.modules.blocks import RecentTokens, right_aligned
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.fusion import Fusion
from fairseq_ms.modules.layer import LayerConfig, TransformerStack
from fairseq_ms.modules.pooling import DOWNSAMPLERS, Downsample
from fairseq_ms.modules.state import CannotTruncate, DecodingState, KeyValueCache


@dataclass
class TopDownConfig(LanguageModelConfig):
    """Flags of ``multiscale_topdown``."""

    scale_layers: str = field(
        default="64x=7,16x=7,4x=8,1x=8", metadata={"help": "number of layers at each scale as SCALEx=LAYERS"}
    )
    downsampler: ChoiceEnum(list(DOWNSAMPLERS)) = field(  # type: ignore[valid-type]
        default="avg", metadata={"help": "how tokens are pooled into blocks"}
    )


def coarse_to_fine(text: str) -> list[Scale]:
    """The scales of ``--scale-layers``, coarsest first; raises UsageError on another form."""
    counts = parse_counts("--scale-layers", text)
    return [Scale(factor, layers) for factor, layers in reversed(counts.items())]


class TopDownScale(nn.Module):
    """One scale: pooling, joining with the coarser scale if there is one, layers over blocks.

    Args:
        scale: its factor and number of layers
        ratio: the coarser scale's factor over this one's, None at the coarsest scale
        config: what the layers have in common
        downsampler: "avg", "max" or "conv"
    """

    def __init__(self, scale: Scale, ratio: int | None, config: LayerConfig, downsampler: str) -> None:
        super().__init__()
        self.factor = scale.factor
        self.pool = Downsample(downsampler, config.dim, scale.factor)
        self.fusion = Fusion(config.dim, ratio, config.activation, config.recompute) if ratio is not None else None
        self.stack = TransformerStack(config, scale.layers)

    def forward(self, x_BTD: Tensor, coarse_BCD: Tensor | None, caches: list[KeyValueCache] | None = None) -> Tensor:
        """Token embeddings (B, T, D) and the coarser scale's output -> (B, ceil(T / factor), D)."""
        if self.fusion is None:
            blocks_BCD = right_aligned(x_BTD, self.pool)
        else:
            assert coarse_BCD is not None
            blocks_BCD = self.fusion(x_BTD, self.pool, coarse_BCD)
        return self.stack(blocks_BCD, None, caches)

    def upsample(self, coarse_BCD: Tensor) -> Tensor:
        """The coarser scale's output as this one sees it: (B, C, D) -> (B, C * ratio, D)."""
        assert self.fusion is not None
        return self.fusion.upsample(coarse_BCD)


class TopDownState(DecodingState):
    """What the scales have cached, each at its own pace.

    Attributes:
        recent: the tokens from which the next blocks will be pooled
        caches: by scale, coarsest first, keys and values of its layers
        upsampled: by scale but the finest, its newest output as the next scale sees it, (B, ratio, D)
    """

    def __init__(self, recent: RecentTokens, caches: list[list[KeyValueCache]]) -> None:
        self.length = 0
        self.recent = recent
        self.caches = caches
        self.upsampled: list[Tensor] = []

    def reorder(self, order: Tensor) -> None:
        self.recent.reorder(order)
        for cache in (cache for caches in self.caches for cache in caches):
            cache.reorder(order)
        self.upsampled = [blocks.index_select(0, order) for blocks in self.upsampled]

    def truncate(self, length: int) -> None:
        if length != self.length:
            raise CannotTruncate


class TopDownDecoder(Decoder):
    """Scales from coarse to fine; the finest gives the features."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.dim = cfg.decoder_embed_dim
        scales = coarse_to_fine(cfg.scale_layers)
        coarser: list[Any] = [None, *scales[:-1]]
        self.scales: Sequence[TopDownScale] = nn.ModuleList(  # type: ignore[assignment]
            TopDownScale(scale, above and above.factor // scale.factor, layer_config(cfg), str(cfg.downsampler))
            for scale, above in zip(scales, coarser)
        )

    def features(self, tokens_BT: Tensor, state: DecodingState | None = None) -> Tensor:
        assert state is None or isinstance(state, TopDownState)
        x_BTD = self.embed(tokens_BT)
        outputs = self._outputs(x_BTD, state)
        if state is not None:
            state.recent.push(x_BTD, 0)
            finer = self.scales[1:]
            state.upsampled = [scale.upsample(output[:, -1:]) for scale, output in zip(finer, outputs)]
            state.length = tokens_BT.size(1)
        return outputs[-1]

    def _outputs(self, x_BTD: Tensor, state: TopDownState | None = None) -> list[Tensor]:
        """What every scale gives, coarsest first, (B, ceil(T / k), D) each."""
        outputs: list[Tensor] = []
        for number, scale in enumerate(self.scales):
            caches = state.caches[number] if state is not None else None
            outputs.append(scale(x_BTD, outputs[-1] if outputs else None, caches))
        return outputs

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By scale k, what its layers give at right-aligned blocks: (B, ceil(T / k), D)."""
        factors = [int(scale.factor) for scale in self.scales]
        return dict(zip(factors, self._outputs(self.embed(tokens_BT))))

    def step(self, tokens_B1: Tensor, state: DecodingState) -> Tensor:
        """A scale runs when a block of it has just ended; between, the finer ones use what it gave."""
        assert isinstance(state, TopDownState)
        position = state.length
        state.length += 1
        x_B1D = self.embed(tokens_B1, start=position)
        state.recent.push(x_B1D, position)
        for number, scale in enumerate(self.scales):
            if position % scale.factor:
                continue
            x_B1D = scale.pool(state.recent.block(position, scale.factor))
            if scale.fusion is not None:
                place = position // scale.factor % scale.fusion.upsample.factor
                x_B1D = scale.fusion.combine(x_B1D, state.upsampled[number - 1][:, place : place + 1])
            x_B1D = scale.stack(x_B1D, None, state.caches[number])
            if number + 1 < len(self.scales):
                state.upsampled[number] = self.scales[number + 1].upsample(x_B1D)
        return x_B1D

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        capacity, like = min(capacity, self.positions), self.like().new_empty(1, 1, self.dim)
        caches = [scale.stack.new_caches(batch_size, -(-capacity // scale.factor), like) for scale in self.scales]
        coarsest = self.scales[0]
        recent = RecentTokens(batch_size, coarsest.factor, coarsest.pool.padding, like)
        return TopDownState(recent, caches)


@register_model("multiscale_topdown", dataclass=TopDownConfig)
class TopDownLanguageModel(LanguageModel):
    """Coarse to fine (Section 3.2)."""

    decoder_class = TopDownDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        coarse_to_fine(cfg.scale_layers)


_CC_NEWS = {"decoder_embed_dim": 1024, "decoder_ffn_embed_dim": 4096, "decoder_attention_heads": 16}
_ALLOCATIONS = [
    (16, 12, 6, 1),
    (10, 10, 8, 5),
    (8, 8, 7, 7),
    (7, 7, 8, 8),
    (5, 5, 9, 9),
    (3, 3, 10, 10),
    (2, 2, 11, 11),
    (1, 1, 12, 12),
]


def _four_scales(layers: tuple[int, ...]) -> str:
    return ",".join(f"{factor}x={count}" for factor, count in zip((64, 16, 4, 1), layers))


# Table 2 (CC-News), Table 3 (WikiText-103) and Table 4 (BookCorpus).
register_presets(
    "multiscale_topdown",
    {
        "ccnews_5_5_6_6": {**_CC_NEWS, "scale_layers": _four_scales((5, 5, 6, 6))},
        "ccnews_5_5_9_9": {**_CC_NEWS, "scale_layers": _four_scales((5, 5, 9, 9))},
        "ccnews_2_4_8_12": {**_CC_NEWS, "scale_layers": _four_scales((2, 4, 8, 12))},
        "wt103_6_12": {"scale_layers": "4x=6,1x=12"},
        "wt103_5_10": {"scale_layers": "4x=5,1x=10"},
        "books_8_12": {"scale_layers": "4x=8,1x=12"},
        "books_4_8_12": {"scale_layers": "16x=4,4x=8,1x=12"},
        "books_2_4_8_12": {"scale_layers": _four_scales((2, 4, 8, 12))},
        **{"books_" + "_".join(map(str, layers)): {"scale_layers": _four_scales(layers)} for layers in _ALLOCATIONS},
        "books_conv_7_7_8_8": {"scale_layers": _four_scales((7, 7, 8, 8)), "downsampler": "conv"},
    },
)
