"""What one of our layers keeps for the backward pass, from its sizes.

With ``--recompute pointwise`` a pre-LN layer keeps its input, the queries, keys and values in one tensor, the
residual state behind the attention and what the first feed-forward projection gives: 5 D + F numbers a position
(9 D with F = 4 D), whatever is dropped. Away from the CPU, torch's attention adds the sum over the values and one
number a row of each head's scores. With ``none`` a layer also keeps both normalised states, the activation, and
the mask of every dropout; on a CPU, attention with dropout then keeps three score matrices a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fairseq.dataclass import FairseqDataclass

from fairseq_ms.core.ops.window_attention import HeadGroup, Layouts


@dataclass(frozen=True)
class Sizes:
    """What the formula depends on.

    Attributes:
        batch, tokens: samples B and tokens T of each
        dim, ffn_dim, heads: D, F and N
        vocabulary: V
        element: bytes of a number
        dropout, attention_dropout, activation_dropout: whether there is any
        recompute: whether pointwise work is computed again in backward
        checkpoint: whether whole layers are
        on_cpu: whether attention is our own, or with ``recompute`` off torch's for a CPU
        downsampler: "avg", "max" or "conv"
    """

    batch: int
    tokens: int
    dim: int
    ffn_dim: int
    heads: int
    vocabulary: int
    element: int = 4
    dropout: bool = False
    attention_dropout: bool = False
    activation_dropout: bool = False
    recompute: bool = True
    checkpoint: bool = False
    on_cpu: bool = True
    downsampler: str = "avg"

    def unit(self, positions: float) -> float:
        """Bytes of a tensor (B, positions, D)."""
        return self.batch * positions * self.dim * self.element

    def rows(self, positions: float, heads: float) -> float:
        """Bytes of one number a head and position."""
        return self.batch * positions * heads * self.element


def sizes_of(
    cfg: FairseqDataclass, batch: int, tokens: int, vocabulary: int, element: int = 4, on_cpu: bool = True
) -> Sizes:
    """The sizes of a model configuration (fairseq's ``cfg.model``)."""
    return Sizes(
        batch=batch,
        tokens=tokens,
        dim=cfg.decoder_embed_dim,
        ffn_dim=cfg.decoder_ffn_embed_dim,
        heads=cfg.decoder_attention_heads,
        vocabulary=vocabulary,
        element=element,
        dropout=cfg.dropout > 0,
        attention_dropout=cfg.attention_dropout > 0,
        activation_dropout=cfg.activation_dropout > 0,
        recompute=str(cfg.recompute) == "pointwise",
        checkpoint=bool(cfg.checkpoint_activations),
        on_cpu=on_cpu,
        downsampler=str(getattr(cfg, "downsampler", "avg")),
    )


def _pointwise_and_ffn(sizes: Sizes, positions: float, states: float = 2) -> dict[str, float]:
    """Residual states, what the norms and dropouts keep, and the feed-forward block, of one layer."""
    unit = sizes.unit(positions)
    hidden = unit / sizes.dim * sizes.ffn_dim
    if sizes.recompute:
        return {"pointwise": states * unit, "feed_forward": hidden}
    # Two normalised states with a mean and a deviation each, and the masks of the two residual dropouts.
    norms = 2 * unit + 2 * sizes.rows(positions, 2)
    masks = 2 * unit * sizes.dropout
    return {
        "pointwise": states * unit + norms + masks,
        "feed_forward": (2 + sizes.activation_dropout) * hidden,
    }


def _own_attention(sizes: Sizes) -> bool:
    """Whether attention keeps nothing but its inputs."""
    return sizes.recompute and sizes.on_cpu


def _scores(sizes: Sizes, queries: float, keys: float, heads: float) -> float:
    """Bytes that torch keeps of N heads' scores: one number a row, or scores, mask and product as matrices."""
    if sizes.attention_dropout and sizes.on_cpu:
        return 3 * sizes.rows(queries, heads) * keys
    return sizes.rows(queries, heads)


def full_layers(sizes: Sizes, scale: int, layers: int, positions: float) -> dict[str, float]:
    """Bytes by column of layers of full attention over ``positions`` positions."""
    if sizes.checkpoint:
        return {"pointwise": layers * sizes.unit(positions)}
    unit = sizes.unit(positions)
    one = {"projections": 3 * unit, **_pointwise_and_ffn(sizes, positions)}
    if not _own_attention(sizes):
        one |= {"scores": _scores(sizes, positions, positions, sizes.heads), "context": unit}
    return {name: layers * value for name, value in one.items()}


def local_layers(sizes: Sizes, layers: int, groups: Sequence[HeadGroup]) -> dict[str, float]:
    """Bytes by column of layers of attention through windows.

    Our own attention keeps the projections. By torch's, queries are kept in blocks, keys and values once for
    every block of queries that sees them, and the sums over values both in blocks and in order.
    """
    if sizes.checkpoint:
        return {"pointwise": layers * sizes.unit(sizes.tokens)}
    unit = sizes.unit(sizes.tokens)
    if _own_attention(sizes):
        width = unit / sizes.heads
        pairs = sum(2 * width * group.heads * (sizes.tokens // group.factor) / sizes.tokens for group in groups)
        one = {"projections": unit + pairs, "hierarchy": _pooling(sizes, groups)}
        one |= _pointwise_and_ffn(sizes, sizes.tokens)
        return {name: layers * value for name, value in one.items()}
    projections = context = scores = 0.0
    for group, layout in zip(groups, Layouts(groups, sizes.tokens, torch.device("cpu")).layouts):
        share = group.heads / sizes.heads
        queries, keys = layout.blocks * layout.query_block, layout.blocks * layout.span
        if layout.keys == 0:
            continue
        projections += share * (sizes.unit(queries) + 2 * sizes.unit(keys))
        context += share * sizes.unit(queries)
        scores += _scores(sizes, queries, layout.span, group.heads)
    one = {
        "projections": projections,
        "scores": scores,
        "context": context + unit,
        "hierarchy": _pooling(sizes, groups),
        **_pointwise_and_ffn(sizes, sizes.tokens),
    }
    return {name: layers * value for name, value in one.items()}


def _pooling(sizes: Sizes, groups: Sequence[HeadGroup]) -> float:
    """Bytes of the pooled input of a layer; max and conv keep what they pool as well."""
    coarse = [group for group in groups if group.factor > 1]
    if not coarse:
        return 0.0
    pooled = sum(sizes.unit(sizes.tokens // group.factor) for group in coarse)
    pooled_from = sizes.unit(sizes.tokens) if sizes.downsampler != "avg" and sizes.recompute else 0.0
    return pooled + pooled_from


def stack_end(sizes: Sizes, positions: float) -> float:
    """The last residual state with its mean and deviation, and its normalisation."""
    return 2 * sizes.unit(positions) + sizes.rows(positions, 2)


def aggregation(sizes: Sizes, heads: dict[int, int]) -> float:
    """The aggregation layer: queries at 1x, keys and values of every coarse scale for its share of the heads."""
    total = 2 * sizes.unit(sizes.tokens)  # queries, and the sums over values in order
    own = _own_attention(sizes) and sizes.attention_dropout
    for scale, count in heads.items():
        share, blocks, seeing = count / sizes.heads, sizes.tokens // scale, sizes.tokens - scale + 1
        if blocks:
            total += share * 2 * sizes.unit(blocks)
        if blocks and not own:
            mask = float(seeing * blocks * sizes.element)
            total += share * sizes.unit(seeing) + _scores(sizes, seeing, blocks, count) + mask
    return total + sum(_pointwise_and_ffn(sizes, sizes.tokens).values())
