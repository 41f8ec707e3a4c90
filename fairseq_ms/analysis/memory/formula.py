"""What our layers keep for the backward pass, from their sizes.

With ``--recompute pointwise`` a pre-LN layer keeps its input, the queries, keys and values in one tensor, the
residual state behind the attention and what the first feed-forward projection gives: 5 D + F numbers a position
(9 D with F = 4 D), whatever is dropped. Away from the CPU, torch's attention adds the sum over the values and one
number a row of each head's scores. With ``none`` a layer also keeps both normalised states, the activation, and
the mask of every dropout; on a CPU, attention with dropout then keeps three score matrices a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

from fairseq_ms.analysis import memory_measured, memory_paper
from fairseq_ms.analysis.memory_rows import Row
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import parse_counts
from fairseq_ms.ops.window_layout import HeadGroup, Layouts


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


def sizes_of(cfg: Any, batch: int, tokens: int, vocabulary: int, element: int = 4, on_cpu: bool = True) -> Sizes:
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
    for group, layout in zip(groups, Layouts(groups, sizes.tokens, torch.device("cpu")).groups):
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


def _stack_end(sizes: Sizes, positions: float) -> float:
    """The last residual state with its mean and deviation, and its normalisation."""
    return 2 * sizes.unit(positions) + sizes.rows(positions, 2)


def _row(scale: int, layers: int, inside: dict[str, float], **more: float) -> Row:
    columns = {name: inside.get(name, 0.0) + more.get(name, 0.0) for name in {*inside, *more}}
    return Row(scale, layers, **columns)


def _logits(sizes: Sizes) -> dict[str, float]:
    # fairseq computes the loss in single precision, whatever the model's.
    logits = 4.0 * sizes.batch * sizes.tokens * sizes.vocabulary
    return {"output": logits, "gradient": logits}


def single_stack(sizes: Sizes, layers: int, groups: Sequence[HeadGroup] | None) -> list[Row]:
    """``vanilla_lm`` and ``retina_lm``."""
    inside = local_layers(sizes, layers, groups) if groups else full_layers(sizes, 1, layers, sizes.tokens)
    return [_row(1, layers, inside, pointwise=_stack_end(sizes, sizes.tokens), **_logits(sizes))]


def top_down(sizes: Sizes, layers: dict[int, int]) -> list[Row]:
    """``multiscale_topdown``, finest scale first."""
    coarsest = max(layers)
    rows = []
    for scale, count in sorted(layers.items()):
        positions = -(-sizes.tokens // scale)
        conv = sizes.downsampler == "conv" and scale > 1
        pooled_from = sizes.unit(sizes.tokens) if sizes.downsampler != "avg" and scale > 1 else 0.0
        if scale == coarsest:
            joined = 0.0
        elif not sizes.recompute:
            joined = 3 * sizes.unit(positions)
        else:
            # The tokens at 1x are kept once for all scales, which pool them again; a convolution keeps what it gave.
            joined = sizes.unit(positions) if scale == 1 or conv else 0.0
            pooled_from = pooled_from if conv else 0.0
        rows.append(
            _row(
                scale,
                count,
                full_layers(sizes, scale, count, positions),
                pointwise=_stack_end(sizes, positions),
                hierarchy=joined + pooled_from,
                **(_logits(sizes) if scale == 1 else {}),
            )
        )
    return rows


def bottom_up(sizes: Sizes, layers: dict[int, int], heads: dict[int, int]) -> list[Row]:
    """``multiscale_bottomup``, finest scale first; the aggregation layer counts as hierarchy at 1x."""
    rows = []
    finer = 1
    for scale, count in sorted(layers.items()):
        positions = sizes.tokens // scale
        pooled_from = sizes.unit(positions * scale // finer) if sizes.downsampler == "max" else 0.0
        inside = full_layers(sizes, scale, count, positions)
        ends = {"pointwise": _stack_end(sizes, positions)}
        if scale == 1:
            ends |= {"hierarchy": _aggregation(sizes, heads), **_logits(sizes)}
        else:
            ends["hierarchy"] = pooled_from
        rows.append(_row(scale, count, inside, **ends))
        finer = scale
    return rows


def _aggregation(sizes: Sizes, heads: dict[int, int]) -> float:
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


def rows_of(cfg: Any, sizes: Sizes) -> list[Row]:
    """The footprint of a model configuration; UsageError, saying why, where there is no formula."""
    arch = architecture(cfg)
    if getattr(cfg, "adaptive_softmax_cutoff", None):
        raise UsageError("there is no formula for --adaptive-softmax-cutoff: what it keeps depends on the tokens")
    if arch in ("vanilla_lm", "retina_lm"):
        from fairseq_ms.models.retina import head_groups

        return single_stack(sizes, cfg.decoder_layers, head_groups(cfg) if cfg.scale_windows else None)
    if arch == "multiscale_topdown":
        return top_down(sizes, parse_counts("--scale-layers", cfg.scale_layers))
    if arch == "multiscale_bottomup":
        from fairseq_ms.models.bottomup import fine_to_coarse

        _, coarse = fine_to_coarse(cfg)
        heads = {scale.factor: scale.heads for scale in coarse}
        return bottom_up(sizes, parse_counts("--scale-layers", cfg.scale_layers), heads)
    raise UsageError(f"there is no formula for {arch}, only the measured bytes")


def require_full_attention(cfg: Any) -> None:
    """Raise UsageError unless the layers of the architecture attend to all positions of their scale."""
    if architecture(cfg) not in ("vanilla_lm", "multiscale_topdown", "multiscale_bottomup") or getattr(
        cfg, "scale_windows", None
    ):
        raise UsageError(f"--sweep needs layers of full attention, which {cfg._name} does not have")


def architecture(cfg: Any) -> str:
    """The model of a configuration, whose name may be that of a preset."""
    return str(ARCH_MODEL_NAME_REGISTRY.get(str(cfg._name), cfg._name))


def parameters(cfg: Any, vocabulary: int) -> int:
    """Number of parameters of the model of a configuration, which is built without memory for them."""
    model = memory_measured.build_model(cfg, vocabulary, on_meta=True)
    return sum(parameter.numel() for parameter in model.parameters())


def footprint(cfg: Any, sizes: Sizes, accounting: str) -> tuple[Callable[[Mapping[int, int]], float], list[int]]:
    """Bytes of a training step as a function of the layers by scale, and the scales of the configuration.

    "ours" counts what is kept, the gradient of the logits, weights, gradients and Adam's two moments;
    "paper" counts as Table 8 does. Raises UsageError where there is no formula.
    """
    arch = architecture(cfg.model)
    several = arch.startswith("multiscale")
    rows_of(cfg.model, sizes)
    scales = list(parse_counts("--scale-layers", cfg.model.scale_layers)) if several else [1]
    if accounting == "paper":
        return _paper_footprint(arch, sizes), scales

    def bytes_of(layers: Mapping[int, int]) -> float:
        with_layers = copy.deepcopy(cfg)
        if several:
            with_layers.model.scale_layers = ",".join(f"{scale}x={count}" for scale, count in layers.items())
        else:
            with_layers.model.decoder_layers = layers[1]
        kept = sum(row.total for row in rows_of(with_layers.model, sizes))
        weights = memory_measured.weight_bytes(parameters(with_layers, sizes.vocabulary), sizes.element)
        return kept + sum(weights.values())

    return bytes_of, scales


def _paper_footprint(arch: str, sizes: Sizes) -> Callable[[Mapping[int, int]], float]:
    shape = memory_paper.Shape(sizes.batch, sizes.tokens, sizes.dim, sizes.ffn_dim, sizes.vocabulary)

    def bytes_of(layers: Mapping[int, int]) -> float:
        if arch == "multiscale_topdown":
            rows = memory_paper.top_down(shape, layers)
        elif arch == "multiscale_bottomup":
            rows = memory_paper.bottom_up(shape, layers)
        else:
            rows = memory_paper.vanilla(shape, layers[1])
        weights = memory_paper.weights(shape, sum(layers.values()), int(arch == "multiscale_bottomup"))
        return sum(row.total for row in rows) + weights

    return bytes_of
