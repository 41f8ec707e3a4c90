"""What our models keep for the backward pass, by scale and purpose, from their configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

from fairseq.dataclass import FairseqDataclass
from omegaconf import DictConfig

from fairseq_ms.analysis import training_step, untrained
from fairseq_ms.analysis.memory import paper
from fairseq_ms.analysis.memory.layers import Sizes, aggregation, full_layers, local_layers, stack_end
from fairseq_ms.analysis.memory.rows import Row
from fairseq_ms.analysis.untrained import architecture
from fairseq_ms.core.ops.window_attention import HeadGroup
from fairseq_ms.core.retina import head_groups
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.scales import Scales, layer_scales
from fairseq_ms.models.retina import scales_of


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
    return [_row(1, layers, inside, pointwise=stack_end(sizes, sizes.tokens), **_logits(sizes))]


def top_down(sizes: Sizes, scales: Scales) -> list[Row]:
    """``multiscale_topdown``, finest scale first."""
    coarsest = scales.factors[-1]
    rows = []
    for scale, count in ((scale.factor, scale.layers) for scale in scales):
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
                pointwise=stack_end(sizes, positions),
                hierarchy=joined + pooled_from,
                **(_logits(sizes) if scale == 1 else {}),
            )
        )
    return rows


def bottom_up(sizes: Sizes, scales: Scales) -> list[Row]:
    """``multiscale_bottomup``, finest scale first; the aggregation layer counts as hierarchy at 1x."""
    heads = {scale.factor: scale.heads for scale in scales.coarse}
    rows = []
    finer = 1
    for scale, count in ((scale.factor, scale.layers) for scale in scales):
        positions = sizes.tokens // scale
        pooled_from = sizes.unit(positions * scale // finer) if sizes.downsampler == "max" else 0.0
        inside = full_layers(sizes, scale, count, positions)
        ends = {"pointwise": stack_end(sizes, positions)}
        if scale == 1:
            ends |= {"hierarchy": aggregation(sizes, heads), **_logits(sizes)}
        else:
            ends["hierarchy"] = pooled_from
        rows.append(_row(scale, count, inside, **ends))
        finer = scale
    return rows


def rows_of(cfg: FairseqDataclass, sizes: Sizes) -> list[Row]:
    """The footprint of a model configuration; UsageError, saying why, where there is no formula."""
    arch = architecture(cfg)
    if getattr(cfg, "adaptive_softmax_cutoff", None):
        raise UsageError("there is no formula for --adaptive-softmax-cutoff: what it keeps depends on the tokens")
    if arch in ("vanilla_lm", "retina_lm"):
        groups = head_groups(scales_of(cfg)) if cfg.scale_windows else None
        return single_stack(sizes, cfg.decoder_layers, groups)
    if arch == "multiscale_topdown":
        return top_down(sizes, layer_scales(cfg.scale_layers))
    if arch == "multiscale_bottomup":
        from fairseq_ms.models.bottomup import fine_to_coarse

        return bottom_up(sizes, fine_to_coarse(cfg))
    raise UsageError(f"there is no formula for {arch}, only the measured bytes")


def require_full_attention(cfg: FairseqDataclass) -> None:
    """Raise UsageError unless the layers of the architecture attend to all positions of their scale."""
    if architecture(cfg) not in ("vanilla_lm", "multiscale_topdown", "multiscale_bottomup") or getattr(
        cfg, "scale_windows", None
    ):
        raise UsageError(f"--sweep needs layers of full attention, which {cfg._name} does not have")


def parameters(cfg: DictConfig, vocabulary: int) -> int:
    """Number of parameters of the model of a configuration, which is built without memory for them."""
    model = untrained.build_model(cfg, vocabulary, on_meta=True)
    return sum(parameter.numel() for parameter in model.parameters())


def footprint(cfg: DictConfig, sizes: Sizes, accounting: str) -> tuple[Callable[[Mapping[int, int]], float], list[int]]:
    """Bytes of a training step as a function of the layers by scale, and the scales of the configuration.

    "ours" counts what is kept, the gradient of the logits, weights, gradients and Adam's two moments;
    "paper" counts as Table 8 does. Raises UsageError where there is no formula.
    """
    arch = architecture(cfg.model)
    several = arch.startswith("multiscale")
    rows_of(cfg.model, sizes)
    scales = layer_scales(cfg.model.scale_layers).factors if several else [1]
    if accounting == "paper":
        return _paper_footprint(arch, sizes), scales

    def bytes_of(layers: Mapping[int, int]) -> float:
        with_layers = copy.deepcopy(cfg)
        if several:
            with_layers.model.scale_layers = ",".join(f"{scale}x={count}" for scale, count in layers.items())
        else:
            with_layers.model.decoder_layers = layers[1]
        kept = sum(row.total for row in rows_of(with_layers.model, sizes))
        weights = training_step.weight_bytes(parameters(with_layers, sizes.vocabulary), sizes.element)
        return kept + sum(weights.values())

    return bytes_of, scales


def _paper_footprint(arch: str, sizes: Sizes) -> Callable[[Mapping[int, int]], float]:
    shape = paper.Shape(sizes.batch, sizes.tokens, sizes.dim, sizes.ffn_dim, sizes.vocabulary)

    def bytes_of(layers: Mapping[int, int]) -> float:
        if arch == "multiscale_topdown":
            rows = paper.top_down(shape, layers)
        elif arch == "multiscale_bottomup":
            rows = paper.bottom_up(shape, layers)
        else:
            rows = paper.vanilla(shape, layers[1])
        weights = paper.weights(shape, sum(layers.values()), int(arch == "multiscale_bottomup"))
        return sum(row.total for row in rows) + weights

    return bytes_of
