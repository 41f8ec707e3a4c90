"""``coarse_lm``: a language model over k-grams that predicts the next one's bag of words (Section 6.2).

The k-grams are right-aligned blocks (``modules/blocks.py``): block i ends with position ik and predicts the k
tokens after it, targets ik .. (i+1)k-1. As a model of tokens, each of them is drawn from that one
distribution, so it is exactly normalised and everything fairseq does with a language model works.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor

from fairseq_ms.models.base import Decoder, LanguageModel
from fairseq_ms.models.config import LanguageModelConfig, layer_config, require
from fairseq_ms.models.presets import register_presets
from fairseq_ms.models.scales import Scale, parse_counts
from fairseq_ms.modules.blocks import RecentTokens, right_aligned
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.layer import TransformerStack
from fairseq_ms.modules.pooling import DOWNSAMPLERS, Downsample
from fairseq_ms.modules.state import CannotTruncate, DecodingState, KeyValueCache, Reorderable


@dataclass
class CoarseConfig(LanguageModelConfig):
    """Flags of ``coarse_lm``."""

    scale_layers: str = field(
        default="4x=12", metadata={"help": "the scale and its number of layers as SCALEx=LAYERS, such as 4x=12"}
    )
    downsampler: ChoiceEnum(list(DOWNSAMPLERS)) = field(  # type: ignore[valid-type]
        default="avg", metadata={"help": "how tokens are pooled into blocks"}
    )


def single_scale(text: str) -> Scale:
    """The one scale of ``--scale-layers``; raises UsageError on another form."""
    counts = parse_counts("--scale-layers", text, need_finest=False)
    require(len(counts) == 1, f"--scale-layers of coarse_lm must have a single scale such as 4x=12: got {text!r}")
    ((factor, layers),) = counts.items()
    return Scale(factor, layers)


class CoarseState(DecodingState):
    """The layers' keys and values, the tokens of the next block, and the features (B, 1, D) of the newest."""

    def __init__(self, recent: RecentTokens, caches: list[KeyValueCache], newest: Tensor) -> None:
        self.length = 0
        self.recent = recent
        self.caches = caches
        self.newest = newest

    def reorder(self, order: Tensor) -> None:
        parts: list[Reorderable] = [self.recent, *self.caches]
        for part in parts:
            part.reorder(order)
        self.newest = self.newest.index_select(0, order)

    def truncate(self, length: int) -> None:
        if length != self.length:
            raise CannotTruncate


class CoarseDecoder(Decoder):
    """Layers over k-grams; the output at every position is that of the newest finished one."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.dim = cfg.decoder_embed_dim
        scale = single_scale(cfg.scale_layers)
        self.factor = scale.factor
        self.pool = Downsample(str(cfg.downsampler), cfg.decoder_embed_dim, scale.factor)
        self.stack = TransformerStack(layer_config(cfg), scale.layers)

    def block_features(self, tokens_BT: Tensor, state: CoarseState | None = None) -> Tensor:
        """Features (B, ceil(T / k), D) of the blocks; block i predicts targets ik .. (i+1)k-1."""
        x_BTD = self.embed(tokens_BT)
        blocks_BCD = self.stack(right_aligned(x_BTD, self.pool), None, state.caches if state is not None else None)
        if state is not None:
            state.recent.push(x_BTD, 0)
            state.newest = blocks_BCD[:, -1:]
            state.length = tokens_BT.size(1)
        return blocks_BCD

    def features(self, tokens_BT: Tensor, state: DecodingState | None = None) -> Tensor:
        assert state is None or isinstance(state, CoarseState)
        blocks_BCD = self.block_features(tokens_BT, state)
        return blocks_BCD.repeat_interleave(self.factor, dim=1)[:, : tokens_BT.size(1)]

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By its scale k, the features of right-aligned blocks: (B, ceil(T / k), D)."""
        return {self.factor: self.block_features(tokens_BT)}

    def step(self, tokens_B1: Tensor, state: DecodingState) -> Tensor:
        """The layers run when a k-gram has just ended."""
        assert isinstance(state, CoarseState)
        position = state.length
        state.length += 1
        state.recent.push(self.embed(tokens_B1, start=position), position)
        if position % self.factor == 0:
            state.newest = self.stack(self.pool(state.recent.block(position, self.factor)), None, state.caches)
        return state.newest

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        capacity, like = min(capacity, self.positions), self.like().new_empty(1, 1, self.dim)
        return CoarseState(
            RecentTokens(batch_size, self.factor, self.pool.padding, like),
            self.stack.new_caches(batch_size, -(-capacity // self.factor), like),
            like.new_empty(batch_size, 1, self.dim),
        )


@register_model("coarse_lm", dataclass=CoarseConfig)
class CoarseLanguageModel(LanguageModel):
    """Predicts the next k-gram's bag of words (Section 6.2)."""

    decoder_class = CoarseDecoder

    def forward(  # type: ignore[override]
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        memory: Any = None,
        per_block: bool = False,
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> logits (B, T, V), or with ``per_block`` those of every block once, (B, C, V).

        C is ceil(T / k); ``extra["scale"]`` is k.
        """
        if not per_block:
            return super().forward(src_tokens, src_lengths, memory)
        decoder = self.decoder
        logits_BCV = decoder.output_layer(decoder.block_features(src_tokens))
        return logits_BCV, {"attn": None, "memory": None, "scale": decoder.factor}

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        single_scale(cfg.scale_layers)


# Table 7 (WikiText-103); the paper does not say how many layers these models have.
register_presets("coarse_lm", {f"wt103_{factor}x": {"scale_layers": f"{factor}x=12"} for factor in (2, 4, 8, 16, 64)})
