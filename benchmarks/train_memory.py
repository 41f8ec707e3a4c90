"""What training keeps for the backward pass, per scored target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor, nn

from benchmarks.memory import resident_growth
from benchmarks.peers import PAPER, TINY, Shape, language_model_loss, random_sample
from benchmarks.runner import Contestant, Options, Section
from benchmarks.training import FAIRSEQ, VANILLA, builders, label, training_parity
from fairseq_ms.analysis.saved_bytes import saved_bytes

NAME = "train-memory"
HELP = "bytes kept for backward per scored target, by autograd's account and by the process's, against fairseq"

GOALS = {
    0.1: {VANILLA: 0.38, "topdown 7,7,8,8": 0.30, "topdown 2,4,8,12": 0.42},
    0.0: {VANILLA: 0.65, "topdown 7,7,8,8": 0.46, "topdown 2,4,8,12": 0.62},
}


def sections(options: Options) -> Iterable[Section]:
    """Saved bytes with and without dropout, then the growth of a fresh process."""
    base = TINY if options.quick else PAPER
    for dropout in (0.1, 0.0):
        shape = replace(base, dropout=dropout)
        baseline = label(FAIRSEQ, shape)
        goals = GOALS[dropout] if not options.quick else {}
        yield Section(
            f"saved tensors, storages counted once, parameters excluded; {shape}",
            "bytes a target",
            [
                Contestant(label(name, shape), lambda b=build, s=shape: _saved(b, s), goals.get(name))
                for name, build in builders(shape).items()
            ],
            baseline,
            training_parity,
            measure="value",
        )
        yield Section(
            f"growth of the process by a forward pass, whatever autograd says; {shape}",
            "bytes a target",
            [
                Contestant(label(name, shape), lambda n=name, s=shape: resident_growth(_forward, n, s) / s.length)
                for name in builders(shape)
            ],
            baseline,
            training_parity,
            measure="value",
        )


def _saved(build: Callable[[], nn.Module], shape: Shape) -> float:
    model, sample = build().train(), random_sample(shape, 1)
    return saved_bytes(lambda: language_model_loss(model, sample), model) / sample["ntokens"]


def _forward(name: str, shape: Shape) -> tuple[Callable[[], Tensor], nn.Module]:
    """A contestant's forward pass, in a process of its own."""
    import fairseq_ms

    fairseq_ms.register()
    model, sample = builders(shape)[name]().train(), random_sample(shape, 1)
    return lambda: language_model_loss(model, sample), model
