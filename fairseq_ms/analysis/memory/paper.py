"""How the paper counts memory (Multi-scale Transformer LMs, Section 3.5, Table 8), decoded from its numbers.

With B = 64 samples, T = 512 tokens, D = 768, F = 3072 and V = 31,300 in half precision, one tensor of shape
(B, T / k, D) has 50.33 MB / k: the unit u of the table at scale k. Then

    Q, K, V                  3 u
    QK^T                     (B, T / k, T / k), twice: scores and their softmax, of a single head
    softmax V                2 u, the sum and its projection
    feed-forward             2 u + 2 (B, T / k, F)
    LN, dropout, residual    10 u for a layer on its own, 11 u in a model
    output and gradient      2 (B, T, V)

A row of the table that has several layers adds up to one more u a layer than its columns do; it is kept as
``unnamed`` here. Models count their weight matrices in half precision, without gradient and optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fairseq_ms.analysis.memory.rows import Row

_HALF = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of the paper's BookCorpus models: batch B, tokens T, D, F and V."""

    batch: int = 64
    tokens: int = 512
    dim: int = 768
    ffn_dim: int = 3072
    vocabulary: int = 31300

    def unit(self, scale: int, tokens: int | None = None) -> float:
        """Bytes of a tensor (B, T / scale, D)."""
        return self.batch * (tokens or self.tokens) / scale * self.dim * _HALF


def _layers(shape: Shape, scale: int, layers: int, tokens: int, pointwise: int, unnamed: int) -> dict[str, float]:
    unit, positions = shape.unit(scale, tokens), tokens / scale
    return {
        "projections": 3 * unit * layers,
        "scores": 2 * shape.batch * positions**2 * _HALF * layers,
        "context": 2 * unit * layers,
        "feed_forward": (2 * unit + 2 * unit / shape.dim * shape.ffn_dim) * layers,
        "pointwise": pointwise * unit * layers,
        "unnamed": unnamed * unit * layers,
    }


def lone_layer(shape: Shape, scale: int) -> Row:
    """A single layer at a scale: the first block of Table 8."""
    return Row(scale, 1, **_layers(shape, scale, 1, shape.tokens, pointwise=10, unnamed=0))


def _in_model(shape: Shape, scale: int, layers: int, tokens: int, hierarchy: float) -> Row:
    ends = {}
    if scale == 1:
        logits = shape.batch * tokens * shape.vocabulary * _HALF
        ends = {"embeddings": shape.unit(1), "output": logits, "gradient": logits}
    inside = _layers(shape, scale, layers, tokens, pointwise=11, unnamed=1)
    return Row(scale, layers, hierarchy=hierarchy, **inside, **ends)


def vanilla(shape: Shape, layers: int) -> list[Row]:
    """The second block of Table 8."""
    return [_in_model(shape, 1, layers, shape.tokens, 0.0)]


def top_down(shape: Shape, layers: Mapping[int, int]) -> list[Row]:
    """The third block of Table 8, finest scale first; the model predicts T minus its coarsest scale tokens.

    Joining with the coarser scale takes 7 u, and upsampling for the finer one 9 u, of the scale it happens at.
    """
    scales = sorted(layers)
    tokens = shape.tokens - scales[-1]
    return [
        _in_model(
            shape,
            scale,
            layers[scale],
            tokens,
            (7 * (scale < scales[-1]) + 9 * (scale > scales[0])) * shape.unit(scale, tokens),
        )
        for scale in scales
    ]


def bottom_up(shape: Shape, layers: Mapping[int, int]) -> list[Row]:
    """The fourth block of Table 8, finest scale first.

    A coarse scale pools into 1 u. The aggregation at 1x is an attention whose queries are tokens and whose
    keys are the blocks of all coarse scales, with the norms, dropout and residuals of a layer.
    """
    scales = sorted(layers)
    coarse = [scale for scale in scales if scale > 1]
    unit = shape.unit(1)
    keys_and_values = sum(2 * shape.unit(scale) for scale in coarse)
    scores = sum(2 * shape.batch * shape.tokens * shape.tokens / scale * _HALF for scale in coarse)
    aggregation = unit + keys_and_values + scores + 2 * unit + 10 * unit
    return [
        _in_model(shape, scale, layers[scale], shape.tokens, aggregation if scale == 1 else shape.unit(scale))
        for scale in scales
    ]


def weights(shape: Shape, layers: int, attentions: int = 0) -> float:
    """Bytes of the weight matrices: two embeddings, layers, and attentions without a feed-forward block."""
    attention = 4 * shape.dim**2
    layer = attention + 2 * shape.dim * shape.ffn_dim
    return _HALF * (2 * shape.vocabulary * shape.dim + layers * layer + attentions * attention)


def table_8() -> list[tuple[str, list[Row], float | None]]:
    """(title, rows, bytes of weights) of the four blocks, with the paper's sizes."""
    shape = Shape()
    return [
        ("a single layer", [lone_layer(shape, scale) for scale in (1, 4, 16, 64)], None),
        ("vanilla, 12 layers", vanilla(shape, 12), weights(shape, 12)),
        ("top-down, 30 layers", top_down(shape, {1: 8, 4: 8, 16: 7, 64: 7}), weights(shape, 30)),
        ("bottom-up, 23 layers", bottom_up(shape, {1: 8, 4: 8, 16: 7}), weights(shape, 23, attentions=1)),
    ]
