"""Several processes train as one does with the same global batch: losses, gradient norms and validation losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fairseq_ms.lm.streaming import StreamingLanguageModel
from tests.curves.runs import RUNS, flags_of
from tests.helpers.forked import rank_log, run
from tests.helpers.resumed import TRANSFORMER_XL, tiny_training
from tests.helpers.together import Curve, curves
from tests.helpers.trained import configuration, random_lines, write_corpus

# All architectures, and the first phase of those that have one; a window differs in numerics, not in batches.
CASES = [name for name in RUNS if name != "vanilla_lm, window"]
MUON = ("--optimizer", "muon", "--adam-lr", "0.003")
WITH_MUON = ["vanilla_lm, Muon", "haed, Muon"]
# fairseq computes losses in single precision, and gradients are in double here.
LOSS, GRADIENT = 1e-6, 1e-9

Together = Callable[..., dict[str, Curve]]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """Trains cases with these settings, streams perhaps with others, in so many processes, and each only once."""
    place = tmp_path_factory.mktemp("together")
    # 7 batches of two blocks, and streams of which some are shorter by a segment.
    data = write_corpus(place / "data", {"train": random_lines(1, 26, 19, 11), "valid": random_lines(2, 5, 19, 9)})
    configurations = {name: configuration(flags_of(name)["task"], arguments(name, data)) for name in CASES}
    for name in WITH_MUON:
        base = name.removesuffix(", Muon")
        configurations[name] = configuration(flags_of(base)["task"], [*arguments(base, data), *MUON])
    found: dict[str, dict[str, Curve]] = {}

    def train(ranks: int, changes: dict, streaming: dict | None = None, cases: Sequence[str] = CASES) -> dict:
        key = repr((ranks, changes, streaming, cases))
        if key not in found:
            settings = [streaming if streaming and "task" in RUNS[name][1] else changes for name in cases]
            log = place / f"{len(found)}.log"
            found[key] = dict(zip(cases, curves([configurations[name] for name in cases], settings, ranks, log)))
        return found[key]

    return train


def arguments(name: str, data: Path) -> list[object]:
    """One epoch of a small model, which ends with a validation."""
    flags = {**flags_of(name), "dropout": 0}
    # Masks are drawn by each process for its own rows, where a single one draws them for all.
    flags |= {flag: 0 for flag in ("attention-dropout", "droppath") if flag in flags}
    if "decoder-attention-heads" in flags:
        flags["attention-dropout"] = 0
    given = [
        part for flag, value in flags.items() for part in ([f"--{flag}"] if value is True else [f"--{flag}", value])
    ]
    return [
        *(data, "--arch", RUNS[name][0], *given, "--optimizer", "adam", "--lr", "0.003", "--clip-norm", "1.0"),
        *("--seed", "3", "--max-epoch", "1", "--batch-size", "2", "--cpu", "--num-workers", "0"),
        *("--no-save", "--save-dir", data / "none", "--log-format", "none"),
    ]


def assert_same(several: dict[str, Curve], one: dict[str, Curve]) -> None:
    for name, expected in one.items():
        for update, (logged, alone) in enumerate(zip(several[name], expected, strict=True)):
            assert logged.keys() == alone.keys()
            for value in alone:
                tolerance = GRADIENT if value == "gnorm" else LOSS
                assert logged[value] == pytest.approx(alone[value], rel=tolerance), f"{name}: {value} of {update}"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_bags_train_where_unused_parameters_are_looked_for(tied: bool, together: Together) -> None:
    """Their output matrix is multiplied outside the model, where torch would not look for it."""
    changes = {"model.share_decoder_input_output_embed": tied}
    one = together(1, {**changes, "optimization.update_freq": [2]}, cases=["coarse_lm"])
    for look in (False, True):
        several = together(2, {**changes, "distributed_training.find_unused_parameters": look}, cases=["coarse_lm"])
        assert_same(several, one)


@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("backend", ["pytorch_ddp", "legacy_ddp"])
def test_two_processes_train_as_one_that_accumulates_their_batches(
    backend: str, frequency: int, together: Together
) -> None:
    """7 batches: in the last update, one process has none, or one where the other has two.

    Two processes have the streams of a batch of four.
    """
    several = together(2, {"distributed_training.ddp_backend": backend, "optimization.update_freq": [frequency]})
    streaming = {"dataset.batch_size": 4, "optimization.update_freq": [frequency]}
    assert_same(several, together(1, {"optimization.update_freq": [2 * frequency]}, streaming=streaming))


def test_two_processes_train_as_one_with_muon(together: Together) -> None:
    """Each makes the updates of matrices orthogonal by itself, from the gradient of both."""
    assert_same(together(2, {}, cases=WITH_MUON), together(1, {"optimization.update_freq": [2]}, cases=WITH_MUON))


def test_two_processes_train_as_one_with_twice_the_batch(together: Together) -> None:
    """Where batches are not shuffled; each process of a first phase has candidates of its own."""
    ordered: dict = {"dataset.curriculum": 9}
    joint = {"dataset.batch_size": 4, "dataset.batch_size_valid": 4}
    cases = [name for name in CASES if "first phase" not in name]
    assert_same(together(2, ordered, cases=cases), together(1, {**ordered, **joint}, cases=cases))


def _failing(rank: int) -> None:
    """A bug in the third forward pass of the second process."""
    forward, calls = StreamingLanguageModel.forward, itertools.count(1)

    def fails(self: Any, *args: Any, **settings: Any) -> Any:
        if rank == 1 and next(calls) == 3:
            raise IndexError("a bug")
        return forward(self, *args, **settings)

    setattr(StreamingLanguageModel, "forward", fails)  # noqa: B010


def test_a_process_that_fails_says_why_and_the_others_end(folders: list[Path], tmp_path: Path) -> None:
    """fairseq saves what it can where a process fails, which is not to wait for the memories of the others."""
    command = tiny_training(folders, tmp_path / "run", *TRANSFORMER_XL, "--tokens-per-sample", "3", "--mem-len", "2")
    log = tmp_path / "log"
    assert run(command, log, ranks=2, fault=_failing) == [1, 1]
    assert "IndexError: a bug" in rank_log(log, 1).read_text()
