"""``transformer_ql``: Transformer-XL at several scales, whose context grows quadratically (Figures 1 and 2)."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ms.lm.config import refuse_given, require
from fairseq_ms.lm.scales import layer_scales
from fairseq_ms.lm.streaming import StreamingConfig, StreamingDecoder, StreamingLanguageModel
from fairseq_ms.modules.embedding import TokenEmbedding
from fairseq_ms.modules.streaming.memory import LayerRun
from fairseq_ms.modules.streaming.scales import ScaleOutput, compress, scale_lengths

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


class ScalesRun:
    """All scales and the output layers at work on one segment, of which ``length`` tokens are done."""

    def __init__(
        self,
        scales: list[list[LayerRun]],
        outputs: list[ScaleOutput],
        final: list[LayerRun],
        states: dict[str, Tensor],
    ) -> None:
        self.scales = scales
        self.outputs = outputs
        self.final = final
        self.states = states
        self.length = 0

    def reorder(self, order: Tensor) -> None:
        for layers in (*self.scales, self.final):
            for layer in layers:
                layer.reorder(order)
        for output in self.outputs:
            output.reorder(order)
        self.states = {name: state.index_select(0, order) for name, state in self.states.items()}


class TransformerQLDecoder(StreamingDecoder):
    """Layers at every scale, each over [memory, segment] of that scale, then layers over their mean."""

    def __init__(self, cfg: Any, dictionary: Any, embed: TokenEmbedding) -> None:
        super().__init__(cfg, dictionary, embed)
        self.compression = str(cfg.compression)
        self.droppath = float(cfg.droppath)
        scales = layer_scales(cfg.scale_layers)
        self.lengths = scale_lengths(self.segment_len, self.mem_len, scales.factors)
        self.scales: Any = nn.ModuleList(
            nn.ModuleList(self.make_layer() for _ in range(scale.layers)) for scale in scales
        )
        # Every layer of Figure 2b ends in a layer norm. A pre-LN layer does not, so its scale does: what is pooled and
        # averaged would otherwise be sums that grow with depth, the coarse scales' the larger ones.
        self.scale_norms: Any = nn.ModuleList(
            nn.LayerNorm(cfg.decoder_embed_dim) if cfg.decoder_normalize_before else nn.Identity() for _ in scales
        )
        self.final = nn.ModuleList(self.make_layer() for _ in range(cfg.output_layers))

    def memory_lengths(self) -> dict[str, int]:
        names: dict[str, int] = {}
        for lengths, layers in zip(self.lengths, self.scales):
            names.update({f"scale{lengths.factor}.layer{n}": lengths.memory for n in range(len(layers))})
            names[f"scale{lengths.factor}.output"] = lengths.trail
        return {**names, **{f"final.layer{n}": self.mem_len for n in range(len(self.final))}}

    def memory_flags(self) -> dict[str, Any]:
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

    def begin(self, states: dict[str, Tensor], distances: dict[str, Tensor] | None = None) -> ScalesRun:
        scales, outputs = [], []
        for lengths, layers in zip(self.lengths, self.scales):
            name = f"scale{lengths.factor}"
            scales.append(self._layer_runs(name, layers, states, lengths.memory, lengths.segment, distances))
            outputs.append(ScaleOutput(lengths, states[f"{name}.output"]))
        final = self._layer_runs("final", self.final, states, self.mem_len, self.segment_len, distances)
        return ScalesRun(scales, outputs, final, states)

    def _layer_runs(
        self,
        name: str,
        layers: Any,
        states: dict[str, Tensor],
        memory: int,
        segment: int,
        distances: dict[str, Tensor] | None,
    ) -> list[LayerRun]:
        positions_PD = self.sinusoids(memory + segment)
        names = [f"{name}.layer{number}" for number in range(len(layers))]
        return [
            self.layer_run(own, layer, states[own], segment, positions_PD, distances)
            for own, layer in zip(names, layers)
        ]

    def advance(self, run: ScalesRun, x_BTD: Tensor) -> Tensor:
        start, count = run.length, x_BTD.size(1)
        run.length += count
        for number, (lengths, layers, output) in enumerate(zip(self.lengths, run.scales, run.outputs)):
            if number:
                x_BTD = compress(run.outputs[number - 1].next_blocks(lengths), lengths.ratio, self.compression)
            if x_BTD.size(1):
                for layer in layers:
                    x_BTD = layer.feed(x_BTD)
                output.append(self.scale_norms[number](x_BTD))
        kept = run.outputs[self._first_kept() :]
        x_BTD = kept[0].at_tokens(start, count)
        for output in kept[1:]:
            x_BTD = x_BTD + output.at_tokens(start, count)
        x_BTD = x_BTD / len(kept)
        for layer in run.final:
            x_BTD = layer.feed(x_BTD)
        return x_BTD

    def _first_kept(self) -> int:
        """The finest scale whose output is used: with droppath, the finer ones are dropped together."""
        scales = len(self.lengths)
        if not self.training or self.droppath == 0.0 or scales == 1:
            return 0
        drawn = torch.rand(()).item()
        # drawn in [(j - 2) p / (l - 1), (j - 1) p / (l - 1)) keeps scales j .. l, counted from 1.
        return 1 + int(drawn * (scales - 1) / self.droppath) if drawn < self.droppath else 0

    def finish(self, run: ScalesRun) -> tuple[dict[str, Tensor], Tensor | None]:
        if not self.mem_len:
            # What stands in for the scales' outputs before the segment stays zero.
            return run.states, None
        states: dict[str, Tensor] = {}
        for lengths, layers, output in zip(self.lengths, run.scales, run.outputs):
            name = f"scale{lengths.factor}"
            states.update({f"{name}.layer{n}": layer.shifted(lengths.shift) for n, layer in enumerate(layers)})
            states[f"{name}.output"] = output.shifted()
        states.update({f"final.layer{n}": layer.shifted(self.segment_len) for n, layer in enumerate(run.final)})
        return states, None


@register_model("transformer_ql", dataclass=TransformerQLConfig)
class TransformerQLLanguageModel(StreamingLanguageModel):
    """Transformer-QL: a memory at several scales (Section 2.3)."""

    decoder_class = TransformerQLDecoder

    @classmethod
    def validate(cls, cfg: Any, task: Any) -> None:
        super().validate(cfg, task)
        coarsest = layer_scales(cfg.scale_layers).factors[-1]
        require(
            cfg.tokens_per_sample % coarsest == 0,
            f"--tokens-per-sample must be a multiple of the coarsest scale of --scale-layers, {coarsest}x: "
            f"got {cfg.tokens_per_sample}",
        )
        require(cfg.output_layers >= 0, f"--output-layers must be at least 0: got {cfg.output_layers}")
        require(0.0 <= cfg.droppath < 1.0, f"--droppath must be at least 0 and below 1: got {cfg.droppath}")
        if not cfg.decoder_normalize_before:
            logger.warning(
                "while the memory is empty, the coarse scales normalise rows of zeros, with very large gradients: set "
                "--decoder-normalize-before, as the paper does, or at least --clip-norm"
            )

    @classmethod
    def refuse_idle(cls, cfg: Any) -> None:
        super().refuse_idle(cfg)
        if len(layer_scales(cfg.scale_layers)) == 1:
            why = f"with the single scale of --scale-layers {cfg.scale_layers}"
            refuse_given(TransformerQLConfig, cfg, ("droppath", "compression"), why)
