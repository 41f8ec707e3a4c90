"""The scales of a Transformer-QL: their lengths, f_c and Accumulate (Transformer-QL, Section 2.3 and Figure 2)."""

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
        skip: how many of the finer scale's kept states lie before those that it is compressed from
    """

    factor: int
    ratio: int
    segment: int
    memory: int
    shift: int
    trail: int
    skip: int = 0


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
        count, start: the tokens
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
