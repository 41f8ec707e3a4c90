"""``transformer_ql``: Transformer-XL at several scales, for a quadratically long context (Transformer-QL, Figure 2)."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.core.layers import TokenEmbedding, TypedList
from fairseq_ms.core.ops.recompute import draw_uniform
from fairseq_ms.core.streaming.layer import shift_all
from fairseq_ms.core.streaming.memory import Memory, Mems
from fairseq_ms.core.streaming.scales import accumulate, compress, scale_lengths
from fairseq_ms.decoding.state import DecodingState
from fairseq_ms.decoding.transformer_ql import TransformerQLState
from fairseq_ms.lm.config import refuse_given, require
from fairseq_ms.lm.scales import layer_scales
from fairseq_ms.lm.streaming import StreamingConfig, StreamingDecoder, StreamingLanguageModel

logger = logging.getLogger(__name__)


@dataclass
class TransformerQLConfig(StreamingConfig):
    """Flags of ``transformer_ql``; with ``--mem-len 0`` it is the paper's Multi-scale Transformer."""

    scale_layers: str = field(default="1x=3,2x=3", metadata={"help": "number of layers at each scale as SCALEx=LAYERS"})
    output_layers: int = field(default=2, metadata={"help": "number of layers after the scales are combined"})
    droppath: float = field(
        default=0.0, metadata={"help": "probability of training on the coarser scales' outputs alone"}
    )
    compression: ChoiceEnum(["max", "avg"]) = field(  # type: ignore[valid-type]
        default="max", metadata={"help": "how states are pooled into those of the next scale"}
    )


class TransformerQLDecoder(StreamingDecoder):
    """Layers at every scale, each over [memory, segment] of that scale, then layers over their mean."""

    def __init__(self, cfg: TransformerQLConfig, dictionary: Dictionary, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.compression = str(cfg.compression)
        self.droppath = float(cfg.droppath)
        scales = layer_scales(cfg.scale_layers)
        self.lengths = scale_lengths(self.segment_len, self.mem_len, scales.factors)
        self.scales = TypedList(TypedList(self.make_layer() for _ in range(scale.layers)) for scale in scales)
        # Every layer of the figure ends in a layer norm. A pre-LN layer does not, so its scale does: what is pooled and
        # averaged would otherwise be sums that grow with depth, the coarse scales' the larger ones.
        norm = nn.LayerNorm if cfg.decoder_normalize_before else nn.Identity
        self.scale_norms = TypedList(norm(cfg.decoder_embed_dim) for _ in scales)
        self.final = TypedList(self.make_layer() for _ in range(cfg.output_layers))

    def forward_segment(self, x_BTD: Tensor, mems: Mems, positions: Tensor) -> tuple[Tensor, Mems, Tensor | None]:
        """Transformer-QL, Figure 2e, lines 7 to 31; its numbers stand beside the lines."""
        s, moving = x_BTD, {}
        acc_inputs: list[Tensor] = []  # 9
        for scale, layers, norm in zip(self.lengths, self.scales, self.scale_norms):  # 11
            name, shift_len = f"scale{scale.factor}", scale.shift  # 8, 20
            if acc_inputs:  # 17, at the next scale
                s = compress(acc_inputs[-1][:, scale.skip :], scale.ratio, self.compression)  # 19
            for index, layer in enumerate(layers):  # 13
                moving[f"{name}.layer{index}"] = s[:, :shift_len]  # 7, 15, 21
                s = layer(s, mems[f"{name}.layer{index}"], positions)  # 14
            s = norm(s)
            moving[f"{name}.output"] = s[:, :shift_len]  # 15
            acc_inputs.append(torch.cat([mems[f"{name}.output"], s], dim=1))  # 16
        first = self._first_kept()
        s = accumulate(acc_inputs[first:], self.lengths[first:], x_BTD.size(1))  # 24
        for index, layer in enumerate(self.final):  # 28
            moving[f"final.layer{index}"] = s  # 25, 30
            s = layer(s, mems[f"final.layer{index}"], positions)  # 29
        # Without a memory, what stands in for the scales' outputs before the segment stays zero.
        return s, shift_all(moving, mems) if self.mem_len else mems, None

    def _first_kept(self) -> int:
        """The finest scale whose output is used: with droppath, the finer ones are dropped together."""
        scales = len(self.lengths)
        if not self.training or self.droppath == 0.0 or scales == 1:
            return 0
        drawn = draw_uniform()
        # drawn in [(j - 2) p / (l - 1), (j - 1) p / (l - 1)) keeps scales j .. l, counted from 1.
        return 1 + int(drawn * (scales - 1) / self.droppath) if drawn < self.droppath else 0

    def memory_lengths(self) -> dict[str, int]:
        names: dict[str, int] = {}
        for lengths, layers in zip(self.lengths, self.scales):
            names.update({f"scale{lengths.factor}.layer{index}": lengths.memory for index in range(len(layers))})
            names[f"scale{lengths.factor}.output"] = lengths.trail
        return {**names, **{f"final.layer{index}": self.mem_len for index in range(len(self.final))}}

    def memory_flags(self) -> dict[str, int | str]:
        layers = [f"{lengths.factor}x={len(layers)}" for lengths, layers in zip(self.lengths, self.scales)]
        return {"--mem-len": self.mem_len, "--scale-layers": ",".join(layers)}

    def memory_reach(self) -> int:
        if not self.mem_len:
            return 0
        tokens = [self.mem_len] * len(self.final)
        for lengths, layers in zip(self.lengths, self.scales):
            tokens += [lengths.memory * lengths.factor] * len(layers) + [lengths.trail * lengths.factor]
        return sum(-(-count // self.segment_len) for count in tokens)

    def idle_without_a_whole_segment(self) -> Iterable[nn.Parameter]:
        # Where no block has ended, coarse scales have nothing to do, nor finer ones whose outputs droppath drops.
        return chain(self.embed.parameters(), self.scales.parameters(), self.scale_norms.parameters())

    def state_after(self, memory: Memory) -> DecodingState:
        return TransformerQLState(self, memory)


@register_model("transformer_ql", dataclass=TransformerQLConfig)
class TransformerQLLanguageModel(StreamingLanguageModel):
    """Transformer-QL: a memory at several scales (Transformer-QL, Section 2.3)."""

    decoder_class = TransformerQLDecoder

    @classmethod
    def validate(cls, cfg: TransformerQLConfig, task: object) -> None:
        super().validate(cfg, task)
        coarsest, segment_len = layer_scales(cfg.scale_layers).factors[-1], cfg.tokens_per_sample or 0
        require(
            segment_len % coarsest == 0,
            f"--tokens-per-sample must be a multiple of the coarsest scale of --scale-layers, {coarsest}x: "
            f"got {segment_len}",
        )
        require(cfg.output_layers >= 0, f"--output-layers must be at least 0: got {cfg.output_layers}")
        require(0.0 <= cfg.droppath < 1.0, f"--droppath must be at least 0 and below 1: got {cfg.droppath}")
        if not cfg.decoder_normalize_before:
            logger.warning(
                "while the memory is empty, the coarse scales normalise rows of zeros, with very large gradients: set "
                "--decoder-normalize-before, as the paper does, or at least --clip-norm"
            )

    @classmethod
    def refuse_idle(cls, cfg: TransformerQLConfig) -> None:
        super().refuse_idle(cfg)
        if len(layer_scales(cfg.scale_layers)) == 1:
            why = f"with the single scale of --scale-layers {cfg.scale_layers}"
            refuse_given(TransformerQLConfig, cfg, ("droppath", "compression"), why)
