"""Which numbers of layers at which scales fit into a memory budget, by our step or by the paper's way of counting.

The paper's (Multi-scale Transformer LMs, Section 3.5, Table 8) is decoded from its numbers. With B = 64 samples,
T = 512 tokens, D = 768, F = 3072 and V = 31,300 in half precision, one tensor of shape (B, T / k, D) has 50.33 MB / k:
the unit u of the table at scale k. Then

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

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig

from fairseq_ms.analysis import training_step, untrained
from fairseq_ms.analysis.training_step import Parts, total
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import layer_scales

Layers = Mapping[int, int]
"""Numbers of layers by scale."""

_HALF = 2


def fit(
    footprint: Callable[[Layers], float], scales: Sequence[int], budget: float, most: int, count: int
) -> list[tuple[Layers, float]]:
    """The ``count`` best allocations of 1 to ``most`` layers a scale that take at most ``budget`` bytes, and the bytes.

    Layers at the finest scale count first, then those at the next one, and so on: the order of the paper's Table 4,
    where perplexity falls as layers move to finer scales, whatever becomes of the total. ``footprint`` must grow by the
    same number of bytes with every further layer of a scale, as memory does. Raises UsageError when not even one layer
    a scale fits.
    """
    smallest = dict.fromkeys(scales, 1)
    base = footprint(smallest)
    if base > budget:
        raise UsageError(
            f"--fit must leave room for one layer a scale, which takes {base / 2**30:.2f} GiB: got {budget / 2**30:g}"
        )
    cost = {scale: footprint({**smallest, scale: 2}) - base for scale in scales}
    every = (dict(zip(sorted(scales), counts)) for counts in itertools.product(range(most, 0, -1), repeat=len(scales)))
    sized = ((layers, base + sum((layers[scale] - 1) * cost[scale] for scale in scales)) for layers in every)
    return list(itertools.islice((found for found in sized if found[1] <= budget), count))


def written(layers: Layers) -> str:
    """Layers as ``--scale-layers`` has them, coarsest scale first."""
    return ",".join(f"{scale}x={count}" for scale, count in sorted(layers.items(), reverse=True))


def scales_of(cfg: DictConfig) -> list[int]:
    """The scales of a configuration that have layers of their own, finest first."""
    text = getattr(cfg.model, "scale_layers", None)
    return [scale.factor for scale in layer_scales(text, need_finest=False)] if text else [1]


def step_bytes(
    cfg: DictConfig, layers: Layers, batch: int, vocabulary: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Bytes of a training step with so many layers at each scale, from a step that is followed by its shapes alone.

    They are what the step keeps, the gradient of the logits, weights, gradients and Adam's two moments. Raises
    UsageError where shapes depend on the tokens.
    """
    cfg = copy.deepcopy(cfg)
    if getattr(cfg.model, "scale_layers", None):
        cfg.model.scale_layers = written(layers)
    else:
        cfg.model.decoder_layers = layers[1]
    tokens = training_step.tokens_of(cfg)
    with training_step.ShapesAlone():
        model = untrained.build_model(cfg, vocabulary, device=device, dtype=dtype)
        kept = training_step.step_bytes(model, batch, tokens) + training_step.logits_gradient(model, batch, tokens)
    return kept + sum(training_step.weight_bytes(model).values())


def paper_bytes(cfg: DictConfig, layers: Layers, batch: int, vocabulary: int) -> float:
    """The same as the paper counts, in Table 8; raises UsageError for a model that is not in it."""
    arch, model = untrained.architecture(cfg.model), cfg.model
    if arch not in ("vanilla_lm", "retina_lm", "multiscale_topdown", "multiscale_bottomup"):
        raise UsageError(f"--accounting paper is for the models of the paper's Table 8: got {arch}")
    tokens = training_step.tokens_of(cfg)
    shape = Shape(batch, tokens, model.decoder_embed_dim, model.decoder_ffn_embed_dim, vocabulary)
    return total(paper_parts(shape, layers, arch)) + paper_weights(shape, layers, arch)


@dataclass(frozen=True)
class Shape:
    """Sizes of the paper's BookCorpus models: batch B, tokens T, D, F and V."""

    batch: int = 64
    tokens: int = 512
    dim: int = 768
    ffn_dim: int = 3072
    vocabulary: int = 31300

    def layers(self, scale: int, layers: int, tokens: int, pointwise: int, unnamed: int) -> dict[str, float]:
        """Bytes of layers at a scale by purpose."""
        unit = self.unit(scale, tokens)
        one = {
            "Q,K,V": 3 * unit,
            "QK^T": 2 * self.batch * (tokens / scale) ** 2 * _HALF,
            "softmax V": 2 * unit,
            "FFN": 2 * unit + 2 * unit / self.dim * self.ffn_dim,
            "LN/drop/res": pointwise * unit,
            "unnamed": unnamed * unit,
        }
        return {purpose: layers * value for purpose, value in one.items()}

    def unit(self, scale: int, tokens: int) -> float:
        """Bytes of a tensor (B, tokens / scale, D)."""
        return self.batch * tokens / scale * self.dim * _HALF


def paper_parts(shape: Shape, layers: Layers, arch: str) -> Parts:
    """The rows of a model in Table 8, by scale, finest first.

    A top-down model predicts T minus its coarsest scale tokens; joining with the coarser scale takes 7 u, and
    upsampling for the finer one 9 u, of the scale it happens at. In a bottom-up model a coarse scale pools into 1 u,
    and the aggregation at 1x is an attention whose queries are tokens and whose keys are the blocks of all coarse
    scales, with the norms, dropout and residuals of a layer.
    """
    coarse = [scale for scale in layers if scale > 1]
    tokens = shape.tokens - (max(layers) if arch == "multiscale_topdown" else 0)
    parts = {}
    for scale in sorted(layers):
        unit, purposes = shape.unit(scale, tokens), shape.layers(scale, layers[scale], tokens, pointwise=11, unnamed=1)
        if scale == 1:
            logits = shape.batch * tokens * shape.vocabulary * _HALF
            purposes |= {"Emb": shape.unit(1, shape.tokens), "output": logits, "out. grad": logits}
        if arch == "multiscale_topdown":
            purposes["hierarchy"] = (7 * (scale < max(layers)) + 9 * (scale > min(layers))) * unit
        elif arch == "multiscale_bottomup" and scale > 1:
            purposes["hierarchy"] = unit
        elif arch == "multiscale_bottomup":
            scores = sum(2 * shape.batch * tokens * tokens / block * _HALF for block in coarse)
            purposes["hierarchy"] = (
                (1 + 2 + 10) * unit + 2 * sum(shape.unit(block, tokens) for block in coarse) + scores
            )
        parts[f"{scale}x"] = purposes
    return parts


def paper_weights(shape: Shape, layers: Layers, arch: str) -> float:
    """Bytes of the weight matrices: two embeddings, layers, and the attention of a bottom-up model's aggregation."""
    attention = 4 * shape.dim**2
    weights = 2 * shape.vocabulary * shape.dim + sum(layers.values()) * (attention + 2 * shape.dim * shape.ffn_dim)
    return _HALF * (weights + attention * (arch == "multiscale_bottomup"))


def table_8() -> list[tuple[str, Parts, float | None]]:
    """(title, scales, bytes of weights) of the four blocks, with the paper's sizes."""
    shape = Shape()
    alone = {f"{scale}x": shape.layers(scale, 1, shape.tokens, pointwise=10, unnamed=0) for scale in (1, 4, 16, 64)}
    found: list[tuple[str, Parts, float | None]] = [("a single layer", alone, None)]
    for title, layers, arch in (
        ("vanilla, 12 layers", {1: 12}, "vanilla_lm"),
        ("top-down, 30 layers", {1: 8, 4: 8, 16: 7, 64: 7}, "multiscale_topdown"),
        ("bottom-up, 23 layers", {1: 8, 4: 8, 16: 7}, "multiscale_bottomup"),
    ):
        found.append((title, paper_parts(shape, layers, arch), paper_weights(shape, layers, arch)))
    return found
