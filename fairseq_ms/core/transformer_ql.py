"""Transformer-QL: Transformer-XL at several scales, for a quadratically long context (Transformer-QL, Figure 2).

Section 2.3 has the lengths of the scales, f_c and Accumulate.
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
        output_layers: how many come after the mean of the scales
        droppath: probability of training on the coarser scales' outputs alone
        compression: "max" or "avg", how states are pooled into those of the next scale
    """

    scales: tuple[Scale, ...] = (Scale(1, 3), Scale(2, 3))
    output_layers: int = 2
    droppath: float = 0.0
    compression: str = "max"


class TransformerQL(StreamingModel):
    """Layers at every scale, each over [memory, segment] of that scale, then layers over their mean."""

    config: TransformerQLConfig

    def __init__(self, config: TransformerQLConfig) -> None:
        super().__init__(config)
        check_layers(config.scales)
        factors = [scale.factor for scale in config.scales]
        if config.segment_len % factors[-1]:
            raise ValueError(
                f"segment_len must be a multiple of the coarsest scale {factors[-1]}: got {config.segment_len}"
            )
        if config.compression not in ("max", "avg"):
            raise ValueError(f"compression must be max or avg: got {config.compression!r}")
        check_probability("droppath", config.droppath)
        self.droppath = config.droppath
        self.lengths = scale_lengths(self.segment_len, self.mem_len, factors)
        self.scales = TypedList(self._layers(f"scale{scale.factor}", scale.layers) for scale in config.scales)
        # Every layer of the figure ends in a layer norm. A pre-LN layer does not, so its scale does: what is pooled and
        # averaged would otherwise be sums that grow with depth, the coarse scales' the larger ones.
        self.scale_norms = TypedList(config.last_norm() for _ in config.scales)
        for scale, layers in zip(self.lengths, self.scales):
            # Without a memory, what stands in for the scales' outputs before the segment stays zero.
            shift = scale.shift if self.mem_len else 0
            self.shifts |= dict.fromkeys([*(layer.name for layer in layers), scale.output], shift)  # 20
        self.final = self._layers("final", config.output_layers)
        self.reset_parameters()

    def _layers(self, name: str, count: int) -> TypedList[TransformerXLLayer]:
        return TypedList(self.make_layer(f"{name}.layer{index}", count) for index in range(count))

    def forward_segment(
        self, x_BTD: Tensor, mems: Mems, positions: Tensor, pasts: Pasts = WHOLE
    ) -> tuple[Tensor, Mems]:
        """Transformer-QL, Figure 2e, lines 7 to 31; its numbers stand beside the lines.

        Of a segment that comes in pieces, a coarse scale moves on when a block of the finer one is complete.
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
        first, start = self._first_kept(), self.lengths[0].done(mems[self.lengths[0].output])
        s = accumulate(acc_inputs[first:], self.lengths[first:], x_BTD.size(1), start)  # 24
        for layer in self.final:  # 28
            moving[layer.name] = s  # 25, 30
            s = layer(s, pasts.get(layer.name), mems[layer.name], positions)  # 29
        return s, moving

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
        # Where no block has ended, coarse scales have nothing to do, nor finer ones whose outputs droppath drops.
        return chain(self.embed.parameters(), self.scales.parameters(), self.scale_norms.parameters())


def draw_uniform() -> float:
    """A number in [0, 1) from torch's default CPU generator."""
    return float(torch.rand((), device="cpu"))


@dataclass(frozen=True)
class ScaleLengths:
    """One scale of a Transformer-QL, in positions of that scale.

    Attributes:
        factor: how many tokens a position stands for
        ratio: how many positions of the finer scale it is compressed from (1 at the finest)
        segment: length of the segment, n_s
        memory: length of the memory of every layer, n_m
        shift: how many states of a segment move into the memory
        trail: how many states before the segment are kept of the scale's output, for the compression into
            the next scale and for the accumulation
        skip: how many of the finer scale's kept states lie before those that it is compressed from
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
        """The name of the memory of the scale's output."""
        return f"scale{self.factor}.output"

    def done(self, states_BTD: Tensor) -> int:
        """How many of the scale's outputs, before the segment and of it, are of the segment."""
        return states_BTD.size(1) - self.trail


def scale_lengths(segment: int, memory: int, factors: Sequence[int]) -> list[ScaleLengths]:
    """The scales of a Transformer-QL with these lengths at its finest scale.

    The window, segment plus memory, is equally long at all scales. Without a memory at the finest scale there
    is none at any, which is the paper's Multi-scale Transformer (Transformer-QL, Appendix D): a scale is compressed
    from the finer one's segment alone. The coarsest factor divides the segment, and the factors divide each other.
    """
    window = segment + memory
    segments = [segment]
    ratios = [coarse // fine for fine, coarse in pairwise(factors)]
    for ratio in ratios:
        segments.append(min((window if memory else segments[-1]) // ratio, segments[-1]))
    scales: list[ScaleLengths] = []
    for index, (factor, length) in enumerate(zip(factors, segments)):
        compressed = ratios[index] * segments[index + 1] if index + 1 < len(segments) else 0
        # At the segment's beginning, accumulation takes the state before it, unless the segment reaches back.
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
    """f_c: maximum or mean of every ``ratio`` states, (B, T, D) -> (B, T // ratio, D), the unfinished rest left out."""
    count = x_BTD.size(1) // ratio
    blocks = x_BTD[:, : count * ratio].unflatten(1, (count, ratio))
    if kind == "avg":
        return blocks.mean(2)
    # Pairwise maxima, because the backward pass of amax compares every element again.
    best = blocks[:, :, 0]
    for index in range(1, ratio):
        best = torch.maximum(best, blocks[:, :, index])
    return best


def accumulate(states: Sequence[Tensor], scales: Sequence[ScaleLengths], count: int, start: int = 0) -> Tensor:
    """Accumulate: the mean of all scales' outputs at tokens start .. start + count - 1 of a segment, (B, count, D).

    Args:
        states: of every scale, the outputs (B, trail + T, D) before the segment and of it, as far as it has come
        scales: their lengths
        count: how many tokens
        start: the first of them
    """
    total = at_tokens(states[0], scales[0], count, start)
    for of_scale, lengths in zip(states[1:], scales[1:]):
        total = total + at_tokens(of_scale, lengths, count, start)
    return total / len(states)


def at_tokens(states_BTD: Tensor, lengths: ScaleLengths, count: int, start: int = 0) -> Tensor:
    """A scale's outputs, over-sampled: at every token the latest that has ended, (B, count, D)."""
    factor = lengths.factor
    # The state that ends with the segment's first token, if a state is a token; else the one before.
    before = lengths.trail + lengths.segment - lengths.shift - 1
    if factor == 1:
        return states_BTD[:, before + 1 + start : before + 1 + start + count]
    first, last = (start + 1) // factor, (start + count) // factor
    ended = states_BTD[:, before + first : before + last + 1]
    repeated = ended.unsqueeze(2).expand(-1, -1, factor, -1).flatten(1, 2)
    skipped = (start + 1) % factor
    return repeated[:, skipped : skipped + count]
