"""``compressive_transformer``: Transformer-XL whose oldest memories are kept in compressed form (Rae et al., 2020)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.lm.config import require
from fairseq_ms.models.transformer_xl import (
    StackRun,
    TransformerXLConfig,
    TransformerXLDecoder,
    TransformerXLLanguageModel,
)
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.pooling import Downsample
from fairseq_ms.modules.streaming.compression import falling_out, reconstruction_loss
from fairseq_ms.modules.streaming.memory import shift


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


class CompressiveRun(StackRun):
    """A stack at work on one segment, and the states it started from."""

    def __init__(self, run: StackRun, states: dict[str, Tensor]) -> None:
        super().__init__(run.layers)
        self.states = states

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.states = {name: state.index_select(0, order) for name, state in self.states.items()}


class CompressiveTransformerDecoder(TransformerXLDecoder):
    """Layers over [compressed memory, memory, segment]."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.compressed_mem_len = int(cfg.compressed_mem_len)
        self.rate = int(cfg.compression_rate)
        self.loss_weight = float(cfg.reconstruction_loss_weight)
        self.compress = nn.ModuleList(Downsample("conv", cfg.decoder_embed_dim, self.rate) for _ in self.layers)

    def memory_lengths(self) -> dict[str, int]:
        compressed = {f"compressed{number}": self.compressed_mem_len for number in range(len(self.layers))}
        return {**super().memory_lengths(), **compressed}

    def memory_flags(self) -> dict[str, Any]:
        return {**super().memory_flags(), "--compressed-mem-len": self.compressed_mem_len}

    def memory_reach(self) -> int:
        tokens = self.mem_len + self.rate * self.compressed_mem_len
        return len(self.layers) * -(-tokens // self.segment_len)

    def idle_without_a_whole_segment(self) -> Iterable[nn.Parameter]:
        return self.compress.parameters()

    def past_of(self, states: dict[str, Tensor], number: int) -> Tensor:
        return torch.cat([states[f"compressed{number}"], states[f"layer{number}"]], dim=1)

    def begin(self, states: dict[str, Tensor], distances: dict[str, Tensor] | None = None) -> CompressiveRun:
        return CompressiveRun(super().begin(states, distances), states)

    def finish(self, run: StackRun) -> tuple[dict[str, Tensor], Tensor | None]:
        assert isinstance(run, CompressiveRun)
        states, losses = {}, []
        for number, (layer_run, compress) in enumerate(zip(run.layers, self.compress)):
            memory, inputs = run.states[f"layer{number}"], layer_run.inputs_BTD
            assert inputs is not None
            old = falling_out(memory, inputs)
            compressed = compress(old)
            if self.training and torch.is_grad_enabled():
                losses.append(reconstruction_loss(layer_run.layer, inputs, old, compressed))
            states[f"layer{number}"] = shift(memory, inputs, self.segment_len)
            states[f"compressed{number}"] = shift(
                run.states[f"compressed{number}"], compressed, self.segment_len // self.rate
            )
        return states, self.loss_weight * torch.stack(losses).sum() if losses else None


@register_model("compressive_transformer", dataclass=CompressiveTransformerConfig)
class CompressiveTransformerLanguageModel(TransformerXLLanguageModel):
    """Compressive Transformer: Transformer-XL plus a compressed memory."""

    decoder_class = CompressiveTransformerDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        require(cfg.compressed_mem_len >= 0, f"--compressed-mem-len must be at least 0: got {cfg.compressed_mem_len}")
        require(cfg.compression_rate >= 2, f"--compression-rate must be at least 2: got {cfg.compression_rate}")
        require(
            cfg.tokens_per_sample % cfg.compression_rate == 0,
            f"--tokens-per-sample must be a multiple of --compression-rate {cfg.compression_rate}: "
            f"got {cfg.tokens_per_sample}",
        )
        require(
            cfg.reconstruction_loss_weight > 0.0,
            "--reconstruction-loss-weight must be above 0, since nothing else trains the compression: "
            f"got {cfg.reconstruction_loss_weight}",
        )
