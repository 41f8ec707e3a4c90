"""Transformer-QL: Transformer-XL at several scales, whose context is quadratically long.

Transformer-QL, Figure 2, and Section 2.3 for the lengths of the scales, f_c and Accumulate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from fairseq_ms.core.layers import TypedList
from fairseq_ms.core.ops.recompute import check_probability
from fairseq_ms.core.scales import Scale, check_layers
from fairseq_ms.core.stream_state import WHOLE, Mems, Pasts
from fairseq_ms.core.streaming import StreamingConfig, StreamingModel, TransformerXLLayer


@dataclass(frozen=True, kw_only=True)
class TransformerQLConfig(StreamingConfig):
    """Sizes of a ``TransformerQL``; with ``mem_len`` 0 it is the paper's Multi-scale Transformer.

    Attributes:
        scales: finest first, each with its number of layers
        output_layers: number of layers after the mean of the scales
        droppath: probability of a training step without the outputs of the finest scales
        compression: how states are pooled for the next scale, "max" or "avg"
    """

    scales: tuple[Scale, ...] = (Scale(1, 3), Scale(2, 3))
    output_layers: int = 2
    droppath: float = 0.0
    compression: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.scales)
        if self.segment_len % (coarsest := self.scales[-1].factor):
            rule = f"segment_len must be a multiple of the coarsest scale {coarsest}"
            raise ValueError(f"{rule}: got {self.segment_len}")
        if self.compression not in ("max", "avg"):
            raise ValueError(f"compression must be max or avg: got {self.compression!r}")
        check_probability("droppath", self.droppath)


class TransformerQL(StreamingModel):
    """Layers at every scale, each over [memory, segment] of that scale, then layers over their mean."""

    config: TransformerQLConfig

    def __init__(self, config: TransformerQLConfig) -> None:
        super().__init__(config)
        self.droppath = config.droppath
        self.lengths = scale_lengths(self.segment_len, self.mem_len, [scale.factor for scale in config.scales])
        self.scales = TypedList(self._layers(f"scale{scale.factor}", scale.layers) for scale in config.scales)
        # Every layer of the figure ends in a layer norm. Pre-LN layers do not, so their scale does: otherwise residual
        # streams, which grow with depth, would be pooled and averaged.
        self.scale_norms = TypedList(config.last_norm() for _ in config.scales)
        for scale, layers in zip(self.lengths, self.scales):
            # Without a memory, a scale's outputs before the segment stay zero.
            shift = scale.shift if self.mem_len else 0
            self.shifts |= dict.fromkeys([*(layer.name for layer in layers), scale.output], shift)  # 20
        self.final = self._layers("final", config.output_layers)
        self.reset_parameters()

    def _layers(self, name: str, count: int) -> TypedList[TransformerXLLayer]:
        return TypedList(self.make_layer(f"{name}.layer{index}", count) for index in range(count))

    def forward_segment(
        self, x_BTD: Tensor, mems: Mems, positions: Tensor, pasts: Pasts = WHOLE
    ) -> tuple[Tensor, Mems]:
        """Transformer-QL, Figure 2e, lines 7 to 31, whose numbers stand beside ours.

        In a segment that is read in pieces, a coarse scale moves on when a block of the finer one is complete.
        """
        s, moving = x_BTD, {}
        acc_inputs: list[Tensor] = []  # 9
        for scale, layers, norm in zip(self.lengths, self.scales, self.scale_norms):  # 11
            before = mems[scale.output]  # 8
            if acc_inputs:  # 17, at the next scale
                read = scale.skip + scale.ratio * scale.done(before)
                s = compress(acc_inputs[-1][:, read:], scale.ratio, self.config.compression)  # 19
            for layer in layers:  # 13
                moving[layer.name] = s  # 7, 15
                s = layer(s, pasts.get(layer.name), mems[layer.name], positions)  # 14
            s = moving[scale.output] = norm(s)  # 15
            acc_inputs.append(torch.cat([before, s], dim=1))  # 16
        first, start = self._finest_kept(), self.lengths[0].done(mems[self.lengths[0].output])
        s = accumulate(acc_inputs[first:], self.lengths[first:], x_BTD.size(1), start)  # 24
        for layer in self.final:  # 28
            moving[layer.name] = s  # 25, 30
            s = layer(s, pasts.get(layer.name), mems[layer.name], positions)  # 29
        return s, moving

    def _finest_kept(self) -> int:
        """Index of the finest scale whose output is used; droppath drops all finer ones."""
        scales = len(self.lengths)
        if not self.training or self.droppath == 0.0 or scales == 1:
            return 0
        drawn = draw_uniform()
        # A number in [(j - 2) p / (l - 1), (j - 1) p / (l - 1)) keeps scales j .. l, counted from 1.
        return 1 + int(drawn * (scales - 1) / self.droppath) if drawn < self.droppath else 0

    def memory_lengths(self) -> dict[str, int]:
        names: dict[str, int] = {}
        for scale, layers in zip(self.lengths, self.scales):
            names |= {**{layer.name: scale.memory for layer in layers}, scale.output: scale.trail}
        return {**names, **{layer.name: self.mem_len for layer in self.final}}

    def memory_reach(self) -> int:
        if not self.mem_len:
            return 0
        tokens = [self.mem_len] * len(self.final)
        for scale, layers in zip(self.lengths, self.scales):
            tokens += [scale.memory * scale.factor] * len(layers) + [scale.trail * scale.factor]
        return sum(-(-count // self.segment_len) for count in tokens)

    def idle_without_a_whole_segment(self) -> Iterable[nn.Parameter]:
        # Coarse scales have no states before a block has ended, and droppath may drop the finer ones.
        return chain(self.embed.parameters(), self.scales.parameters(), self.scale_norms.parameters())


def draw_uniform() -> float:
    """A number in [0, 1) from torch's default CPU generator."""
    return float(torch.rand((), device="cpu"))


@dataclass(frozen=True)
class ScaleLengths:
    """One scale of a Transformer-QL, in positions of that scale.

    Attributes:
        factor: tokens of a position
        ratio: positions of the finer scale that are compressed into one (1 at the finest)
        segment: length of the segment, n_s
        memory: length of every layer's memory, n_m
        shift: states of a segment that move into the memory
        trail: outputs of the scale that are kept from before the segment, for compression and accumulation
        skip: of the finer scale's kept outputs, the oldest ones that this scale is not compressed from
    """

    factor: int
    ratio: int
    segment: int
    memory: int
    shift: int
    trail: int
    skip: int = 0

    @property
    def output(self) -> str:
        """The name of the memory that keeps the scale's outputs."""
        return f"scale{self.factor}.output"

    def done(self, states_BTD: Tensor) -> int:
        """How many outputs of the segment there are among ``trail`` older ones and these."""
        return states_BTD.size(1) - self.trail


def scale_lengths(segment: int, memory: int, factors: Sequence[int]) -> list[ScaleLengths]:
    """The lengths of all scales, given those of segment and memory at the finest (Transformer-QL, Section 2.3).

    The window, segment plus memory, is equally long at all scales. Without a memory at the finest scale there is none
    at any, and a scale is compressed from the finer one's segment alone: the Multi-scale Transformer of Appendix D.
    The coarsest factor divides the segment, and the factors divide each other.
    """
    window = segment + memory
    segments = [segment]
    ratios = [coarse // fine for fine, coarse in pairwise(factors)]
    for ratio in ratios:
        segments.append(min((window if memory else segments[-1]) // ratio, segments[-1]))
    scales: list[ScaleLengths] = []
    for index, (factor, length) in enumerate(zip(factors, segments)):
        compressed = ratios[index] * segments[index + 1] if index + 1 < len(segments) else 0
        # Accumulation needs the output before the segment, unless the scale's own segment reaches further back.
        trail = max(compressed - length, 1 if factor > 1 and length == segment // factor else 0)
        scales.append(
            ScaleLengths(
                factor=factor,
                ratio=ratios[index - 1] if index else 1,
                segment=length,
                memory=window - length if memory else 0,
                shift=segment // factor,
                trail=trail,
                skip=scales[-1].trail + scales[-1].segment - ratios[index - 1] * length if index else 0,
            )
        )
    return scales


def compress(x_BTD: Tensor, ratio: int, kind: str) -> Tensor:
    """f_c: maximum or mean of every ``ratio`` states, without an unfinished rest: (B, T, D) -> (B, T // ratio, D)."""
    count = x_BTD.size(1) // ratio
    blocks = x_BTD[:, : count * ratio].unflatten(1, (count, ratio))
    if kind == "avg":
        return blocks.mean(2)
    # Not ``amax``, whose backward pass compares every element again.
    best = blocks[:, :, 0]
    for index in range(1, ratio):
        best = torch.maximum(best, blocks[:, :, index])
    return best


def accumulate(states: Sequence[Tensor], scales: Sequence[ScaleLengths], count: int, start: int = 0) -> Tensor:
    """Accumulate: the mean of all scales' outputs at tokens start .. start + count - 1 of a segment, (B, count, D).

    ``states`` are the outputs (B, trail + T, D) of every scale, before the segment and in it so far.
    """
    finest, *coarse = (at_tokens(x, lengths, count, start) for x, lengths in zip(states, scales))
    return sum(coarse, finest) / len(states)


def at_tokens(states_BTD: Tensor, lengths: ScaleLengths, count: int, start: int = 0) -> Tensor:
    """A scale's outputs repeated, so that every token has the latest one that has ended: (B, count, D)."""
    factor = lengths.factor
    # Index of the last output before the segment's first token.
    before = lengths.trail + lengths.segment - lengths.shift - 1
    if factor == 1:
        return states_BTD[:, before + 1 + start : before + 1 + start + count]
    first, last = (start + 1) // factor, (start + count) // factor
    ended = states_BTD[:, before + first : before + last + 1]
    repeated = ended.unsqueeze(2).expand(-1, -1, factor, -1).flatten(1, 2)
    skipped = (start + 1) % factor
    return repeated[:, skipped : skipped + count]
