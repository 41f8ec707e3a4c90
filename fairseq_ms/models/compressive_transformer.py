"""``compressive_transformer``: Transformer-XL whose oldest memories are kept in compressed form (Rae et al., 2020)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from fairseq.data import Dictionary
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.core.layers import TokenEmbedding, TypedList
from fairseq_ms.core.pooling import Downsample
from fairseq_ms.core.streaming.compression import falling_out, reconstruction_loss
from fairseq_ms.core.streaming.layer import shift_all
from fairseq_ms.core.streaming.memory import Memory, Mems
from fairseq_ms.decoding.compressive_transformer import CompressiveTransformerState
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.lm.config import require
from fairseq_ms.models.transformer_xl import (
    TransformerXLConfig,
    TransformerXLDecoder,
    TransformerXLLanguageModel,
)


@dataclass
class CompressiveTransformerConfig(TransformerXLConfig):
    """Flags of ``compressive_transformer``."""

    mem_len: int = field(
        default=12, metadata={"help": "number of states before the segment that every layer remembers"}
    )
    compressed_mem_len: int = field(
        default=12, metadata={"help": "number of compressed states before those that every layer remembers"}
    )
    compression_rate: int = field(default=2, metadata={"help": "how many states are compressed into one"})
    reconstruction_loss_weight: float = field(
        default=0.01, metadata={"help": "weight of the attention-reconstruction loss, which trains the compression"}
    )


class CompressiveTransformerDecoder(TransformerXLDecoder):
    """Layers over [compressed memory, memory, segment]."""

    has_auxiliary_loss = True

    def __init__(self, cfg: CompressiveTransformerConfig, dictionary: Dictionary, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.compressed_mem_len = int(cfg.compressed_mem_len)
        self.window += self.compressed_mem_len
        self.rate = int(cfg.compression_rate)
        self.loss_weight = float(cfg.reconstruction_loss_weight)
        self.compress = TypedList(Downsample("conv", cfg.decoder_embed_dim, self.rate) for _ in self.layers)

    def forward_segment(self, x_BTD: Tensor, mems: Mems, positions: Tensor) -> tuple[Tensor, Mems, Tensor | None]:
        """Compressive Transformer, Algorithm 1, and in training the loss of Algorithm 2, of every row."""
        s, moving, losses = x_BTD, {}, []
        whole = s.size(1) == self.segment_len
        for index, (layer, f_c) in enumerate(zip(self.layers, self.compress)):
            m, cm = mems[f"layer{index}"], mems[f"compressed{index}"]
            if whole:
                old = falling_out(m, s)
                new_cm = f_c(old)
                if self.training:
                    losses.append(reconstruction_loss(layer, s, old, new_cm))
                moving[f"layer{index}"], moving[f"compressed{index}"] = s, new_cm
            s = layer(s, torch.cat([cm, m], dim=1), positions)
        return (
            s,
            {**mems, **shift_all(moving, mems)},
            self.loss_weight * torch.stack(losses).sum(dim=0) if losses else None,
        )

    def memory_lengths(self) -> dict[str, int]:
        names = {f"layer{index}": self.mem_len for index in range(len(self.layers))}
        return {**names, **{f"compressed{index}": self.compressed_mem_len for index in range(len(self.layers))}}

    def memory_flags(self) -> dict[str, int | str]:
        return {**super().memory_flags(), "--compressed-mem-len": self.compressed_mem_len}

    def memory_reach(self) -> int:
        tokens = self.mem_len + self.rate * self.compressed_mem_len
        return len(self.layers) * -(-tokens // self.segment_len)

    def idle_without_a_whole_segment(self) -> Iterable[nn.Parameter]:
        return self.compress.parameters()

    def state_after(self, memory: Memory) -> DecodingState:
        return CompressiveTransformerState(self, memory)


@register_model("compressive_transformer", dataclass=CompressiveTransformerConfig)
class CompressiveTransformerLanguageModel(TransformerXLLanguageModel):
    """Compressive Transformer: Transformer-XL plus a compressed memory."""

    decoder_class = CompressiveTransformerDecoder

    @classmethod
    def validate(cls, cfg: CompressiveTransformerConfig, task: object) -> None:
        super().validate(cfg, task)
        require(cfg.compressed_mem_len >= 0, f"--compressed-mem-len must be at least 0: got {cfg.compressed_mem_len}")
        require(cfg.compression_rate >= 2, f"--compression-rate must be at least 2: got {cfg.compression_rate}")
        segment_len = cfg.tokens_per_sample or 0
        require(
            segment_len % cfg.compression_rate == 0,
            f"--tokens-per-sample must be a multiple of --compression-rate {cfg.compression_rate}: got {segment_len}",
        )
        require(
            cfg.reconstruction_loss_weight > 0.0,
            "--reconstruction-loss-weight must be above 0, since nothing else trains the compression: "
            f"got {cfg.reconstruction_loss_weight}",
        )
