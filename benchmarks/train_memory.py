"""What training keeps for the backward pass, per scored target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from benchmarks.losses import LOSSES, hidden_bytes
from benchmarks.memory import resident_growth, resident_peak
from benchmarks.peers import Shape, random_sample
from benchmarks.runner import Contestant, Options, Section
from benchmarks.training import FAIRSEQ, VANILLA, builders, criterion_of, label, shape_of, training_parity
from fairseq_ms.analysis.saved_bytes import saved_bytes

NAME = "train-memory"
HELP = "bytes kept for backward per scored target, by autograd and by the process, and the peak, against fairseq"

# Of a single row, gradients of parameters would be most of the peak.
PEAK_ROWS = 4
# By criterion and number of symbols, then by dropout.
GOALS: dict[tuple[str, int], dict[float, dict[str, float]]] = {
    ("cross_entropy", 8000): {
        0.1: {VANILLA: 0.38, "topdown 7,7,8,8": 0.30, "topdown 2,4,8,12": 0.42},
        0.0: {VANILLA: 0.65, "topdown 7,7,8,8": 0.46, "topdown 2,4,8,12": 0.62},
    },
    ("linear_cross_entropy", 31300): {
        0.1: {VANILLA: 0.21, "topdown 7,7,8,8": 0.16, "topdown 2,4,8,12": 0.215, "retina 12": 0.165},
        0.0: {VANILLA: 0.49, "topdown 7,7,8,8": 0.38, "topdown 2,4,8,12": 0.50, "retina 12": 0.385},
    },
}


def sections(options: Options) -> Iterable[Section]:
    """Saved bytes with and without dropout, then the growth of a fresh process and its peak in a whole step."""
    base, parity = shape_of(options), partial(training_parity, options.criterion)
    for dropout in (0.1, 0.0):
        shape = replace(base, dropout=dropout)
        baseline = label(FAIRSEQ, shape)
        goals = {} if options.quick else GOALS.get((options.criterion, base.vocabulary), {}).get(dropout, {})
        yield Section(
            f"saved tensors, storages counted once, parameters excluded; {shape}",
            "bytes a target",
            [
                Contestant(
                    label(name, shape), lambda n=name, s=shape: _saved(n, s, criterion_of(n, options)), goals.get(name)
                )
                for name in builders(shape)
            ],
            baseline,
            parity,
            measure="value",
        )
        for title, measure, rows in (
            ("growth of the process by a forward pass, whatever autograd says", resident_growth, 1),
            (
                f"peak of the process in a forward and backward pass of {PEAK_ROWS} rows, gradients of parameters "
                "included",
                resident_peak,
                PEAK_ROWS,
            ),
        ):
            yield Section(
                f"{title}; {shape}",
                "bytes a target",
                [
                    Contestant(
                        label(name, shape),
                        lambda n=name, s=shape, m=measure, r=rows: (
                            m(_forward, n, s, criterion_of(n, options), r) / (r * s.length)
                        ),
                    )
                    for name in builders(shape)
                ],
                baseline,
                parity,
                measure="value",
            )


def _saved(name: str, shape: Shape, criterion: str) -> float:
    model, sample = builders(shape)[name]().train(), random_sample(shape, 1)
    kept = saved_bytes(lambda: LOSSES[criterion](model, sample), model)
    return (kept + hidden_bytes(LOSSES[criterion](model, sample))) / sample["ntokens"]


def _forward(name: str, shape: Shape, criterion: str, rows: int) -> tuple[Callable[[], Tensor], nn.Module]:
    """A contestant's forward pass, in a process of its own."""
    import fairseq_ms

    fairseq_ms.register()
    model, sample = builders(shape)[name]().train(), random_sample(shape, rows)
    return lambda: LOSSES[criterion](model, sample), model
