"""How long a step of training takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks.losses import LOSSES
from benchmarks.peers import random_sample
from benchmarks.runner import Contestant, Options, Section
from benchmarks.training import FAIRSEQ, VANILLA, builders, criterion_of, label, shape_of, training_parity

NAME = "train-speed"
HELP = "time of a training step, forward and backward, and of Adam's update, against fairseq"

# Of a model's step with another criterion to that of the same model with cross_entropy.
CRITERION_GOAL = 1.02
GOALS = {VANILLA: 0.85, "topdown 7,7,8,8": 0.65, "topdown 2,4,8,12": 0.80}
ROWS = 2


def sections(options: Options) -> Iterable[Section]:
    """Forward and backward with dropout; then Adam's update, which depends on the number of parameters alone."""
    shape = replace(shape_of(options), dropout=0.1)
    sample = random_sample(shape, ROWS)
    wanted = {
        name: build
        for name, build in builders(shape).items()
        if name == FAIRSEQ or not options.only or any(part in name for part in options.only)
    }
    models = {name: build().train() for name, build in wanted.items()}

    def step(model: nn.Module, criterion: str = "cross_entropy") -> None:
        model.zero_grad(set_to_none=True)
        LOSSES[criterion](model, sample).backward()
        # Else the gradients of all models would be in memory at once.
        model.zero_grad(set_to_none=True)

    goals = {} if options.quick or options.vocabulary else GOALS
    others = {
        f"{label(name, shape)}, {options.criterion}": (label(name, shape), model)
        for name, model in models.items()
        if criterion_of(name, options) != "cross_entropy"
    }
    yield Section(
        f"forward and backward of {ROWS} x {shape.length} tokens; {shape}",
        "ms",
        [Contestant(label(name, shape), lambda m=model: step(m), goals.get(name)) for name, model in models.items()]
        + [Contestant(name, lambda m=model: step(m, options.criterion)) for name, (_, model) in others.items()],
        label(FAIRSEQ, shape),
        partial(training_parity, options.criterion),
        scale=1e3,
        further={plain: {name: CRITERION_GOAL} for name, (plain, _) in others.items()},
    )
    yield Section(
        "Adam's update (torch, fused), once an update however many tokens it is of",
        "ms",
        [Contestant(label(name, shape), _Update(model)) for name, model in models.items()],
        label(FAIRSEQ, shape),
        training_parity,
        scale=1e3,
    )


class _Update:
    """One update of a model's parameters; its buffers live while it runs, in the first call and never after."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.buffers: list[torch.Tensor] | None = None

    def __call__(self) -> None:
        tensors = [p.detach() for p in self.parameters]
        if self.buffers is None:
            # One flat buffer each for gradients and moments, shared by all calls.
            self.buffers = [torch.zeros(sum(p.numel() for p in self.parameters)) for _ in range(3)]
        sizes = [p.numel() for p in self.parameters]
        grads, first, second = (
            [part.view_as(p) for part, p in zip(buffer.split(sizes), self.parameters)] for buffer in self.buffers
        )
        steps = [torch.ones(()) for _ in self.parameters]
        torch._fused_adam_(
            tensors, grads, first, second, [], steps,
            lr=0.0, beta1=0.9, beta2=0.98, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
