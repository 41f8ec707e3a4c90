"""``multiscale_bottomup``: from fine to coarse, then one aggregation layer (Section 3.3, Figure 1b, Listing 2).

Every coarse scale pools the output of the finer one. Block i of scale k covers positions ik .. (i+1)k-1 and is
used from its last position on; an incomplete last block is used by nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.models.base import Decoder, LanguageModel
from fairseq_ms.models.config import LanguageModelConfig, layer_config, require
from fairseq_ms.models.presets import register_presets
from fairseq_ms.models.scales import Scale, parse_counts
from fairseq_ms.modules.aggregation import AggregationAttention
from fairseq_ms.modules.blocks import UnfinishedBlock
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.idle import keep_in_graph
from fairseq_ms.modules.layer import LayerConfig, TransformerLayer, TransformerStack
from fairseq_ms.modules.pooling import DOWNSAMPLERS, Downsample
from fairseq_ms.modules.state import CannotTruncate, DecodingState, KeyValueCache, Reorderable


@dataclass
class BottomUpConfig(LanguageModelConfig):
    """Flags of ``multiscale_bottomup``."""

    scale_layers: str = field(
        default="16x=8,4x=9,1x=9",
        metadata={"help": "number of layers at each scale as SCALEx=LAYERS, beside the aggregation layer"},
    )
    scale_heads: Optional[str] = field(
        default=None,
        metadata={"help": "heads of the aggregation layer for each coarse scale as SCALEx=HEADS (default: evenly)"},
    )
    downsampler: ChoiceEnum(list(DOWNSAMPLERS)) = field(  # type: ignore[valid-type]
        default="avg", metadata={"help": "how positions are pooled into blocks"}
    )


def fine_to_coarse(cfg: Any) -> tuple[int, list[Scale]]:
    """The number of layers at 1x, and the coarse scales, finest first, with the heads that look at them.

    Raises UsageError when ``--scale-layers`` or ``--scale-heads`` breaks a rule.
    """
    layers = parse_counts("--scale-layers", cfg.scale_layers)
    coarse = [factor for factor in layers if factor > 1]
    total = cfg.decoder_attention_heads
    require(
        bool(coarse), f"--scale-layers of multiscale_bottomup must have a scale beside 1x: got {cfg.scale_layers!r}"
    )
    if cfg.scale_heads is None:
        require(
            total % len(coarse) == 0,
            f"--decoder-attention-heads must be a multiple of the {len(coarse)} coarse scales of --scale-layers "
            f"unless --scale-heads splits them: got {total}",
        )
        heads = {factor: total // len(coarse) for factor in coarse}
    else:
        heads = parse_counts("--scale-heads", cfg.scale_heads, need_finest=False)
        require(
            list(heads) == coarse,
            f"--scale-heads must name the coarse scales of --scale-layers {cfg.scale_layers!r}: "
            f"got {cfg.scale_heads!r}",
        )
        require(
            sum(heads.values()) == total,
            f"--scale-heads must add up to --decoder-attention-heads {total}: got {cfg.scale_heads!r}",
        )
    return layers[1], [Scale(factor, layers[factor], heads=heads[factor]) for factor in coarse]


class BottomUpScale(nn.Module):
    """One coarse scale: pooling the finer scale's output, layers over blocks.

    Args:
        scale: its factor and number of layers
        ratio: its factor over the finer scale's
        config: what the layers have in common
        downsampler: "avg", "max" or "conv"
    """

    def __init__(self, scale: Scale, ratio: int, config: LayerConfig, downsampler: str) -> None:
        super().__init__()
        self.ratio = ratio
        self.pool = Downsample(downsampler, config.dim, ratio)
        self.stack = TransformerStack(config, scale.layers)

    def forward(self, fine_BCD: Tensor, caches: list[KeyValueCache] | None = None) -> Tensor:
        """The finer scale's output (B, C, D) -> (B, C // ratio, D), finished blocks only."""
        blocks_BCD = self.pool(fine_BCD[:, : fine_BCD.size(1) // self.ratio * self.ratio])
        return self.stack(blocks_BCD, None, caches) if blocks_BCD.size(1) else blocks_BCD


class BottomUpState(DecodingState):
    """What the scales have cached, each at its own pace.

    Attributes:
        unfinished: by coarse scale, finest first, the outputs of the finer scale that wait to be pooled
        coarse: by coarse scale, keys and values of its layers
        aggregation: by coarse scale, keys and values of its blocks
        fine: keys and values of the layers at 1x
    """

    def __init__(
        self,
        unfinished: list[UnfinishedBlock],
        coarse: list[list[KeyValueCache]],
        aggregation: list[KeyValueCache],
        fine: list[KeyValueCache],
    ) -> None:
        self.length = 0
        self.unfinished = unfinished
        self.coarse = coarse
        self.aggregation = aggregation
        self.fine = fine

    def reorder(self, order: Tensor) -> None:
        coarse = [cache for caches in self.coarse for cache in caches]
        parts: list[Reorderable] = [*self.unfinished, *coarse, *self.aggregation, *self.fine]
        for part in parts:
            part.reorder(order)

    def truncate(self, length: int) -> None:
        if length != self.length:
            raise CannotTruncate


class BottomUpDecoder(Decoder):
    """Coarse scales one above the other, then the aggregation layer and the layers at 1x."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.dim = cfg.decoder_embed_dim
        config = layer_config(cfg)
        fine_layers, scales = fine_to_coarse(cfg)
        finer = [1, *(scale.factor for scale in scales)]
        self.coarse: Sequence[BottomUpScale] = nn.ModuleList(  # type: ignore[assignment]
            BottomUpScale(scale, scale.factor // below, config, str(cfg.downsampler))
            for scale, below in zip(scales, finer)
        )
        heads = {scale.factor: scale.heads for scale in scales}
        attention = AggregationAttention(config.dim, heads, config.attention_dropout, config.recompute)
        self.aggregate = TransformerLayer(config, attention)
        self.stack = TransformerStack(config, fine_layers)

    @property
    def attention(self) -> AggregationAttention:
        """That of the aggregation layer."""
        attention = self.aggregate.attention
        assert isinstance(attention, AggregationAttention)
        return attention

    def features(self, tokens_BT: Tensor, state: DecodingState | None = None) -> Tensor:
        assert state is None or isinstance(state, BottomUpState)
        x_BTD = self.embed(tokens_BT)
        outputs = [x_BTD]
        for number, scale in enumerate(self.coarse):
            outputs.append(scale(outputs[-1], state.coarse[number] if state is not None else None))
        if state is None:
            y_BTD = self.stack(self.aggregate(x_BTD, outputs[1:]))
            return keep_in_graph(y_BTD, self._idle(outputs)) if self.training else y_BTD
        for unfinished, fine_BCD in zip(state.unfinished, outputs):
            unfinished.push(fine_BCD)
        state.length = tokens_BT.size(1)
        return self.stack(self.aggregate(x_BTD, outputs[1:], state.aggregation), None, state.fine)

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By scale k, what its layers give at finished blocks: (B, T // k, D)."""
        outputs = [self.embed(tokens_BT)]
        for scale in self.coarse:
            outputs.append(scale(outputs[-1]))
        fine_BTD = self.stack(self.aggregate(outputs[0], outputs[1:]))
        return {1: fine_BTD, **dict(zip(self.attention.heads, outputs[1:]))}

    def _idle(self, outputs: list[Tensor]) -> list[nn.Parameter]:
        """The parameters that too short a batch leaves without work."""
        return [
            parameter
            for blocks, *modules in zip(outputs[1:], self.coarse, self.attention.coarse)
            if blocks.size(1) == 0
            for module in modules
            for parameter in module.parameters()
        ]

    def step(self, tokens_B1: Tensor, state: DecodingState) -> Tensor:
        """A coarse scale runs when a block of it is finished; its keys and values then join those seen."""
        assert isinstance(state, BottomUpState)
        x_B1D = self.embed(tokens_B1, start=state.length)
        state.length += 1
        newest = x_B1D
        for number, scale in enumerate(self.coarse):
            if not state.unfinished[number].push(newest):
                break
            newest = scale(state.unfinished[number].buffer, state.coarse[number])
            keys, values = self.attention.keys_and_values(number, newest)
            state.aggregation[number].append(keys, values)
        return self.stack(self.aggregate(x_B1D, None, state.aggregation), None, state.fine)

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        capacity, like = min(capacity, self.positions), self.like().new_empty(1, 1, self.dim)
        factors = self.attention.heads
        coarse = [
            scale.stack.new_caches(batch_size, capacity // factor, like) for scale, factor in zip(self.coarse, factors)
        ]
        return BottomUpState(
            [UnfinishedBlock(batch_size, scale.ratio, like) for scale in self.coarse],
            coarse,
            self.attention.new_cache(batch_size, capacity, like),
            self.stack.new_caches(batch_size, capacity, like),
        )


@register_model("multiscale_bottomup", dataclass=BottomUpConfig)
class BottomUpLanguageModel(LanguageModel):
    """Fine to coarse, then one aggregation layer (Section 3.3)."""

    decoder_class = BottomUpDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        fine_to_coarse(cfg)


# Table 3 (WikiText-103), Table 5 and Table 8 (BookCorpus).
register_presets(
    "multiscale_bottomup",
    {
        "wt103_5_10": {"scale_layers": "4x=5,1x=10"},
        "books_8_9_9": {"scale_layers": "16x=8,4x=9,1x=9"},
        "books_7_8_8": {"scale_layers": "16x=7,4x=8,1x=8"},
    },
)
