"""The lengths of a Transformer-QL's scales, counted by hand."""

import pytest

from fairseq_ms.core.transformer_ql import ScaleLengths, scale_lengths


@pytest.mark.parametrize(
    ("segment", "memory", "expected"),
    [
        # A window of 16 at every scale. Eight pairs are made of the segment's eight tokens and eight before it, eight
        # fours of eight pairs and eight before them; nothing is made of the fours.
        (
            8,
            8,
            [
                ScaleLengths(1, ratio=1, segment=8, memory=8, shift=8, trail=8),
                ScaleLengths(2, ratio=2, segment=8, memory=8, shift=4, trail=8),
                ScaleLengths(4, ratio=2, segment=8, memory=8, shift=2, trail=0),
            ],
        ),
        # A window of 12. Six pairs are made of the segment's eight tokens and four before it.
        (
            8,
            4,
            [
                ScaleLengths(1, ratio=1, segment=8, memory=4, shift=8, trail=4),
                ScaleLengths(2, ratio=2, segment=6, memory=6, shift=4, trail=6),
                ScaleLengths(4, ratio=2, segment=6, memory=6, shift=2, trail=0),
            ],
        ),
        # No memory. The pairs cover the segment, and keep the one state before it that its first tokens take.
        (
            8,
            0,
            [
                ScaleLengths(1, ratio=1, segment=8, memory=0, shift=8, trail=0),
                ScaleLengths(2, ratio=2, segment=4, memory=0, shift=4, trail=1),
            ],
        ),
        # No memory. The fours are made of the eight pairs of the segment alone, not of the state before them.
        (
            16,
            0,
            [
                ScaleLengths(1, ratio=1, segment=16, memory=0, shift=16, trail=0),
                ScaleLengths(2, ratio=2, segment=8, memory=0, shift=8, trail=1),
                ScaleLengths(4, ratio=2, segment=4, memory=0, shift=4, trail=1, skip=1),
            ],
        ),
        (5, 3, [ScaleLengths(1, ratio=1, segment=5, memory=3, shift=5, trail=0)]),
    ],
)
def test_every_scale_has_the_lengths_that_its_window_leaves_it(
    segment: int, memory: int, expected: list[ScaleLengths]
) -> None:
    assert scale_lengths(segment, memory, [scale.factor for scale in expected]) == expected
