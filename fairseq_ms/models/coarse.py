"""``coarse_lm``: a language model over k-grams that predicts the next one's bag of words (Section 6.2).

The k-grams are right-aligned blocks (``modules/multiscale/blocks.py``): block i ends with position ik and predicts the
k tokens after it, targets ik .. (i+1)k-1. As a model of tokens, each of them is drawn from that one
distribution, so it is exactly normalised and everything fairseq does with a language model works.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor

from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.config import LanguageModelConfig, layer_config
from fairseq_ms.lm.scales import single_scale
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.kv_cache import CannotTruncate, DecodingState, KeyValueCache, Reorderable, is_identity
from fairseq_ms.modules.multiscale.blocks import RecentTokens, right_aligned
from fairseq_ms.modules.pooling import DOWNSAMPLERS, Downsample
from fairseq_ms.modules.transformer import TransformerStack


@dataclass
class CoarseConfig(LanguageModelConfig):
    """Flags of ``coarse_lm``."""

    scale_layers: str = field(
        default="4x=12", metadata={"help": "the scale and its number of layers as SCALEx=LAYERS, such as 4x=12"}
    )
    downsampler: ChoiceEnum(list(DOWNSAMPLERS)) = field(  # type: ignore[valid-type]
        default="avg", metadata={"help": "how tokens are pooled into blocks"}
    )


class CoarseState(DecodingState):
    """The layers' keys and values, the tokens of the next block, and the features (B, 1, D) of the newest."""

    def __init__(self, batch_size: int, recent: RecentTokens, caches: list[KeyValueCache], newest: Tensor) -> None:
        self.batch_size = batch_size
        self.length = 0
        self.recent = recent
        self.caches = caches
        self.newest = newest

    def reorder(self, order: Tensor) -> None:
        if is_identity(order, self.batch_size):
            return
        self.batch_size = order.numel()
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
            batch_size,
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
