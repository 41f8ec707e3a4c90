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

from fairseq_ms.analysis.memory.table import Parts

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
    one = {
        "Q,K,V": 3 * unit,
        "QK^T": 2 * shape.batch * positions**2 * _HALF,
        "softmax V": 2 * unit,
        "FFN": 2 * unit + 2 * unit / shape.dim * shape.ffn_dim,
        "LN/drop/res": pointwise * unit,
        "unnamed": unnamed * unit,
    }
    return {purpose: layers * value for purpose, value in one.items()}


def lone_layers(shape: Shape) -> Parts:
    """A single layer at each scale: the first block of Table 8."""
    return {f"{scale}x": _layers(shape, scale, 1, shape.tokens, pointwise=10, unnamed=0) for scale in (1, 4, 16, 64)}


def _in_model(shape: Shape, layers: Mapping[int, int], tokens: int, hierarchy: Mapping[int, float]) -> Parts:
    """The scales of a model, finest first."""
    parts = {}
    for scale in sorted(layers):
        parts[f"{scale}x"] = _layers(shape, scale, layers[scale], tokens, pointwise=11, unnamed=1)
        if scale == 1:
            logits = shape.batch * tokens * shape.vocabulary * _HALF
            parts["1x"] |= {"Emb": shape.unit(1), "output": logits, "out. grad": logits}
        parts[f"{scale}x"]["hierarchy"] = hierarchy.get(scale, 0.0)
    return parts


def vanilla(shape: Shape, layers: Mapping[int, int]) -> Parts:
    """The second block of Table 8."""
    return _in_model(shape, layers, shape.tokens, {})


def top_down(shape: Shape, layers: Mapping[int, int]) -> Parts:
    """The third block of Table 8; the model predicts T minus its coarsest scale tokens.

    Joining with the coarser scale takes 7 u, and upsampling for the finer one 9 u, of the scale it happens at.
    """
    finest, coarsest = min(layers), max(layers)
    tokens = shape.tokens - coarsest
    units = {scale: 7 * (scale < coarsest) + 9 * (scale > finest) for scale in layers}
    return _in_model(shape, layers, tokens, {scale: n * shape.unit(scale, tokens) for scale, n in units.items()})


def bottom_up(shape: Shape, layers: Mapping[int, int]) -> Parts:
    """The fourth block of Table 8.

    A coarse scale pools into 1 u. The aggregation at 1x is an attention whose queries are tokens and whose
    keys are the blocks of all coarse scales, with the norms, dropout and residuals of a layer.
    """
    hierarchy = {scale: shape.unit(scale) for scale in layers if scale > 1}
    scores = sum(2 * shape.batch * shape.tokens * shape.tokens / scale * _HALF for scale in hierarchy)
    hierarchy[1] = (1 + 2 + 10) * shape.unit(1) + 2 * sum(hierarchy.values()) + scores
    return _in_model(shape, layers, shape.tokens, hierarchy)


def weights(shape: Shape, layers: int, attentions: int = 0) -> float:
    """Bytes of the weight matrices: two embeddings, layers, and attentions without a feed-forward block."""
    attention = 4 * shape.dim**2
    layer = attention + 2 * shape.dim * shape.ffn_dim
    return _HALF * (2 * shape.vocabulary * shape.dim + layers * layer + attentions * attention)


def table_8() -> list[tuple[str, Parts, float | None]]:
    """(title, scales, bytes of weights) of the four blocks, with the paper's sizes."""
    shape = Shape()
    return [
        ("a single layer", lone_layers(shape), None),
        ("vanilla, 12 layers", vanilla(shape, {1: 12}), weights(shape, 12)),
        ("top-down, 30 layers", top_down(shape, {1: 8, 4: 8, 16: 7, 64: 7}), weights(shape, 30)),
        ("bottom-up, 23 layers", bottom_up(shape, {1: 8, 4: 8, 16: 7}), weights(shape, 23, attentions=1)),
    ]
