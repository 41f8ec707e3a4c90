"""Which numbers of layers at which scales fit into a memory budget."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from omegaconf import DictConfig

from fairseq_ms.analysis import training_step, untrained
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import layer_scales

Layers = Mapping[int, int]
"""Numbers of layers by scale."""


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
