"""Layers under ``torch.compile`` against layers that compute again by hand what they do not keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.losses import LOSSES, hidden_bytes
from benchmarks.peers import TINY, fairseq_lm, random_sample
from benchmarks.runner import Contestant, Options, Section, assert_parity
from benchmarks.training import FAIRSEQ, VANILLA, build_ours, label, shape_of
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
            models |= {
                f"{label(name, shape)}, {way}": build_ours(name, shape, **flags).train() for way, flags in WAYS.items()
            }

    def loss(name: str, model: nn.Module) -> Tensor:
        return LOSSES["cross_entropy" if name == baseline else options.criterion](model, sample)

    def step(name: str, model: nn.Module) -> None:
        loss(name, model).backward()
        # Else the gradients of all models would be in memory at once.
        model.zero_grad(set_to_none=True)

    def kept(name: str, model: nn.Module) -> float:
        return (saved_bytes(lambda: loss(name, model), model) + hidden_bytes(loss(name, model))) / sample["ntokens"]

    def contestants(work: Callable[[str, nn.Module], float | None]) -> list[Contestant]:
        return [Contestant(name, partial(work, name, model)) for name, model in models.items()]

    parity = partial(_parity, options.criterion, names)
    title = f"forward and backward of {ROWS} x {shape.length} tokens; {shape}"
    yield Section(title, "ms", contestants(step), baseline, parity, scale=1e3)
    title = f"saved tensors, storages counted once, parameters excluded; {shape}"
    yield Section(title, "bytes a target", contestants(kept), baseline, parity, measure="value")


@cache
def _parity(criterion: str, names: tuple[str, ...]) -> str:
    """Loss and gradients of compiled layers against those of the same layers as they are, at a small shape."""
    worst, sample = 0.0, random_sample(TINY, 2)
    plain_flags, compiled_flags = WAYS["--recompute none"], WAYS["--recompute none --compile-layers"]
    for name in names:
        plain, compiled = build_ours(name, TINY, **plain_flags), build_ours(name, TINY, **compiled_flags)
        compiled.load_state_dict(plain.state_dict())
        results = []
        for model in (plain, compiled):
            loss = LOSSES[criterion](model, sample) / sample["ntokens"]
            results.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
        (one, grads), (other, other_grads) = results
        worst = max(worst, assert_parity(f"loss of {name}", one, other, TOLERANCE))
        for (parameter, _), first, second in zip(plain.named_parameters(), grads, other_grads, strict=True):
            worst = max(worst, assert_parity(f"{name}: gradient of {parameter}", first, second, TOLERANCE))
    return f"compiled layers equal layers as they are, on loss and gradients, to {worst:.1e}"
