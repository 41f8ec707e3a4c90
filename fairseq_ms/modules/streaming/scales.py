"""Lengths of segment and memory at every scale of a Transformer-QL, and its compression (Section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


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
    """

    factor: int
    ratio: int
    segment: int
    memory: int
    shift: int
    trail: int


def scale_lengths(segment: int, memory: int, factors: Sequence[int]) -> list[ScaleLengths]:
    """The scales of a Transformer-QL with these lengths at its finest scale.

    The window, segment plus memory, is equally long at all scales. Without a memory at the finest scale there
    is none at any, which is the paper's Multi-scale Transformer (Appendix D). The coarsest factor divides the
    segment, and the factors divide each other.
    """
    window = segment + memory
    segments = [segment]
    ratios = [coarse // fine for fine, coarse in pairwise(factors)]
    for ratio in ratios:
        segments.append(min(window // ratio, segments[-1]))
    scales = []
    for number, (factor, length) in enumerate(zip(factors, segments)):
        compressed = ratios[number] * segments[number + 1] if number + 1 < len(segments) else 0
        # At the segment's beginning, accumulation takes the state before it, unless the segment reaches back.
        trail = max(compressed - length, 1 if factor > 1 and length == segment // factor else 0)
        scales.append(
            ScaleLengths(
                factor=factor,
                ratio=ratios[number - 1] if number else 1,
                segment=length,
                memory=window - length if memory else 0,
                shift=segment // factor,
                trail=trail,
            )
        )
    return scales


def compress(x_BTD: Tensor, ratio: int, kind: str) -> Tensor:
    """Maximum or mean of every ``ratio`` states, (B, C * ratio, D) -> (B, C, D)."""
    blocks = x_BTD.unflatten(1, (-1, ratio))
    if kind == "avg":
        return blocks.mean(2)
    # Pairwise maxima, because the backward pass of amax compares every element again.
    best = blocks[:, :, 0]
    for number in range(1, ratio):
        best = torch.maximum(best, blocks[:, :, number])
    return best


class ScaleOutput:
    """The outputs of a scale over one segment, behind those that are remembered.

    Args:
        lengths: the scale
        remembered_BTD: the last ``lengths.trail`` outputs before the segment
    """

    def __init__(self, lengths: ScaleLengths, remembered_BTD: Tensor) -> None:
        self.lengths = lengths
        self.states_BTD = remembered_BTD
        self.compressed = 0

    def append(self, x_BTD: Tensor) -> None:
        """More outputs of the segment."""
        self.states_BTD = torch.cat([self.states_BTD, x_BTD], dim=1)

    def next_blocks(self, coarser: ScaleLengths) -> Tensor:
        """The states that the next scale compresses into blocks and that it has not had yet, (B, C * ratio, D).

        The blocks end where the segment ends: ``coarser.segment`` of them, the first from the memory.
        """
        first = self.lengths.trail + self.lengths.segment - coarser.ratio * coarser.segment
        finished = max(0, (self.states_BTD.size(1) - first) // coarser.ratio)
        start, end = first + coarser.ratio * self.compressed, first + coarser.ratio * finished
        self.compressed = finished
        return self.states_BTD[:, start:end]

    def at_tokens(self, start: int, count: int) -> Tensor:
        """For tokens start .. start + count - 1 of the segment, the latest output that has ended, (B, count, D)."""
        factor = self.lengths.factor
        # The state that has ended when the segment begins.
        before = self.lengths.trail + self.lengths.segment - self.lengths.shift - 1
        if factor == 1:
            return self.states_BTD[:, before + 1 + start : before + 1 + start + count]
        first, last = (start + 1) // factor, (start + count) // factor
        states = self.states_BTD[:, before + first : before + last + 1]
        repeated = states.unsqueeze(2).expand(-1, -1, factor, -1).flatten(1, 2)
        skipped = (start + 1) % factor
        return repeated[:, skipped : skipped + count]

    def shifted(self) -> Tensor:
        """What is remembered when the segment is over, without gradient."""
        start = self.lengths.shift
        return self.states_BTD[:, start : start + self.lengths.trail].detach()

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row ``order[i]`` was."""
        self.states_BTD = self.states_BTD.index_select(0, order)
