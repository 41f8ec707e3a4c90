"""Which numbers of layers at which scales fit into a memory budget (Sections 3.5 and 5.3, Table 4)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig

from fairseq_ms.analysis import training_step, untrained
from fairseq_ms.analysis.memory import paper, table
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import layer_scales

Layers = Mapping[int, int]


@dataclass(frozen=True)
class Allocation:
    """Layers by scale, and the bytes of a training step with them."""

    layers: dict[int, int]
    bytes: float

    def __str__(self) -> str:
        return written(self.layers)


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
    shape = paper.Shape(batch, tokens, model.decoder_embed_dim, model.decoder_ffn_embed_dim, vocabulary)
    parts = {"multiscale_topdown": paper.top_down, "multiscale_bottomup": paper.bottom_up}.get(arch, paper.vanilla)
    weights = paper.weights(shape, sum(layers.values()), int(arch == "multiscale_bottomup"))
    return table.total(parts(shape, layers)) + weights


def fit(
    footprint: Callable[[Layers], float], scales: Sequence[int], budget: float, most: int, count: int
) -> list[Allocation]:
    """The ``count`` best allocations of 1 to ``most`` layers a scale that take at most ``budget`` bytes.

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
    found = []
    for counts in itertools.product(range(most, 0, -1), repeat=len(scales)):
        layers = dict(zip(sorted(scales), counts))
        bytes = base + sum((layers[scale] - 1) * cost[scale] for scale in scales)
        if bytes <= budget:
            found.append(Allocation(layers, bytes))
            if len(found) == count:
                break
    return found
