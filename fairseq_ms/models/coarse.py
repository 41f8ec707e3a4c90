"""``coarse_lm``: a language model over k-grams that predicts the next one's bag of words.

Multi-scale Transformer LMs, Section 6.2.

The k-grams are right-aligned blocks (``modules/pooling.py``): block i ends with position ik and predicts the
k tokens after it, targets ik .. (i+1)k-1. As a model of tokens, each of them is drawn from that one
distribution, so it is exactly normalised and everything fairseq does with a language model works.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.decoding.coarse import CoarseState
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.lm.base import Decoder, LanguageModel
from fairseq_ms.lm.choices import Downsampler
from fairseq_ms.lm.config import LanguageModelConfig, layer_config
from fairseq_ms.lm.scales import single_scale
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.pooling import Downsample, normalised, right_aligned
from fairseq_ms.modules.transformer import TransformerStack
from fairseq_ms.ops.idle import keep_in_graph


@dataclass
class CoarseConfig(LanguageModelConfig):
    """Flags of ``coarse_lm``."""

    scale_layers: str = field(
        default="4x=12", metadata={"help": "the scale and its number of layers as SCALEx=LAYERS, such as 4x=12"}
    )
    downsampler: Downsampler = field(default="avg", metadata={"help": "how tokens are pooled into blocks"})


class CoarseDecoder(Decoder):
    """Layers over k-grams; the output at every position is that of the newest finished one."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        scale = single_scale(cfg.scale_layers)
        self.factor = scale.factor
        self.pool = Downsample(str(cfg.downsampler), cfg.decoder_embed_dim, scale.factor)
        layers = layer_config(cfg)
        self.recompute = layers.recompute
        self.norm = nn.LayerNorm(layers.dim)
        self.stack = TransformerStack(layers, scale.layers)

    def block_features(self, tokens_BT: Tensor) -> Tensor:
        """Features (B, ceil(T / k), D) of the blocks; block i predicts targets ik .. (i+1)k-1."""
        return self.stack(normalised(self.blocks, self.embed(tokens_BT), self.pool, self.norm, self.recompute))

    def blocks(self, x_BTD: Tensor) -> Tensor:
        """The pooled tokens: (B, T, D) -> (B, ceil(T / k), D)."""
        return right_aligned(x_BTD, self.pool)

    def features(self, tokens_BT: Tensor) -> Tensor:
        return self.block_features(tokens_BT).repeat_interleave(self.factor, dim=1)[:, : tokens_BT.size(1)]

    def representations(self, tokens_BT: Tensor) -> dict[int, Tensor]:
        """By its scale k, the features of right-aligned blocks: (B, ceil(T / k), D)."""
        return {self.factor: self.block_features(tokens_BT)}

    def new_state(self, batch_size: int, capacity: int) -> DecodingState:
        return CoarseState(self.embed, self.pool, self.norm, self.stack, batch_size, min(capacity, self.positions))


@register_model("coarse_lm", dataclass=CoarseConfig)
class CoarseLanguageModel(LanguageModel):
    """Predicts the next k-gram's bag of words (Multi-scale Transformer LMs, Section 6.2)."""

    decoder_class = CoarseDecoder

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        memory: Any = None,
        features_only: bool = False,
        per_block: bool = False,
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> logits (B, T, V), or with ``per_block`` those of every block once, (B, C, V).

        C is ceil(T / k); ``extra["scale"]`` is k. With ``features_only``, features stand in for the logits.
        """
        if not per_block:
            return super().forward(src_tokens, src_lengths, memory, features_only)
        decoder = self.decoder
        x_BCD = decoder.block_features(src_tokens)
        extra = {"attn": None, "memory": None, "scale": decoder.factor}
        if not features_only:
            return decoder.output_layer(x_BCD), extra
        # Whose matrix the criterion multiplies with: torch may look here for what is used.
        return keep_in_graph(x_BCD, decoder.project.parameters()), extra

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        single_scale(cfg.scale_layers)
