"""Layers under ``torch.compile`` against layers that compute again by hand what they do not keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.losses import LOSSES, hidden_bytes
from benchmarks.peers import TINY, Shape, build, fairseq_lm, multiscale, random_sample
from benchmarks.runner import Contestant, Options, Section, assert_parity
from benchmarks.training import FAIRSEQ, VANILLA, label, shape_of
from fairseq_ms.analysis.saved_bytes import saved_bytes

NAME = "compiled-layers"
HELP = "time of a training step and bytes kept for backward with --compile-layers, against --recompute"

MODELS = (VANILLA, "topdown 7,7,8,8", "topdown 2,4,8,12")
WAYS: dict[str, dict[str, Any]] = {
    "--recompute pointwise": {"recompute": "pointwise"},
    "--recompute none": {"recompute": "none"},
    "--recompute none --compile-layers": {"recompute": "none", "compile_layers": True},
}
ROWS = 2
# float32 with two layers, relative to values and gradients of order 1.
TOLERANCE = 1e-5


def sections(options: Options) -> Iterable[Section]:
    """A step of every model in every way, with dropout; then what it keeps."""
    shape = replace(shape_of(options), dropout=0.1)
    sample = random_sample(shape, ROWS)
    baseline = label(FAIRSEQ, shape)
    models = {baseline: fairseq_lm(shape).train()}
    # Compiling takes longer than everything else here.
    names = MODELS[:1] if options.quick else MODELS
    for name in names:
        if not options.only or any(part in name for part in options.only):
            models |= {f"{label(name, shape)}, {way}": _model(name, shape, way) for way in WAYS}

    def loss(name: str, model: nn.Module) -> Tensor:
        return LOSSES["cross_entropy" if name == baseline else options.criterion](model, sample)

    def step(name: str, model: nn.Module) -> None:
        loss(name, model).backward()
        # Else the gradients of all models would be in memory at once.
        model.zero_grad(set_to_none=True)

    yield Section(
        f"forward and backward of {ROWS} x {shape.length} tokens; {shape}",
        "ms",
        [Contestant(name, lambda n=name, m=model: step(n, m)) for name, model in models.items()],
        baseline,
        partial(_parity, options.criterion, names),
        scale=1e3,
    )

    def kept(name: str, model: nn.Module) -> float:
        return (saved_bytes(lambda: loss(name, model), model) + hidden_bytes(loss(name, model))) / sample["ntokens"]

    yield Section(
        f"saved tensors, storages counted once, parameters excluded; {shape}",
        "bytes a target",
        [Contestant(name, lambda n=name, m=model: kept(n, m)) for name, model in models.items()],
        baseline,
        partial(_parity, options.criterion, names),
        measure="value",
    )


def _model(name: str, shape: Shape, way: str) -> nn.Module:
    flags = WAYS[way]
    if name == VANILLA:
        return build("vanilla_lm", shape, decoder_layers=shape.layers, **flags).train()
    return multiscale(name, shape, **flags).train()


@cache
def _parity(criterion: str, names: tuple[str, ...]) -> str:
    """Loss and gradients of compiled layers against those of the same layers as they are, at a small shape."""
    worst, sample = 0.0, random_sample(TINY, 2)
    plain_way, compiled_way = "--recompute none", "--recompute none --compile-layers"
    for name in names:
        plain, compiled = _model(name, TINY, plain_way), _model(name, TINY, compiled_way)
        compiled.load_state_dict(plain.state_dict())
        results = []
        for model in (plain, compiled):
            loss = LOSSES[criterion](model, sample) / sample["ntokens"]
            results.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
        (one, grads), (other, other_grads) = results
        worst = max(worst, assert_parity(f"loss of {name}", one, other, TOLERANCE))
        for (parameter, _), first, second in zip(plain.named_parameters(), grads, other_grads, strict=True):
            if first is not None and second is not None:
                worst = max(worst, assert_parity(f"{name}: gradient of {parameter}", first, second, TOLERANCE))
    return f"compiled layers equal layers as they are, on loss and gradients, to {worst:.1e}"
