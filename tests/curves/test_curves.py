"""The first updates of every architecture are those that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.curves.runs import KEPT, RUNS, corpus, train
from tests.registry import ARCHITECTURES

# Relative: every processor adds sums up in its own order. With the kernels of older ones (ATEN_CPU_CAPABILITY=avx2 and
# =default, ONEDNN_MAX_CPU_ISA=AVX2) on the Intel Xeon that recorded them, and on an AMD EPYC with and without MKL_CBWR,
# nothing is more than 2.1e-6 off: five times that leaves room for others. A small change of numerics, the tanh that
# approximates GELU, moves five norms by 6.6e-5 or more.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("curves") / "corpus")


def test_every_architecture_has_a_curve() -> None:
    assert {arch for arch, _ in RUNS.values()} == set(ARCHITECTURES)
    names = {f"{run}: {name}" for run in RUNS for name in ("loss", "gnorm")}
    assert set(json.loads(KEPT.read_text())) == names


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_gradient_norms_are_those_that_are_kept(run: str, data: Path) -> None:
    kept = json.loads(KEPT.read_text())
    for name, found in train(run, data).items():
        expected = pytest.approx(kept[f"{run}: {name}"], rel=TOLERANCE)
        assert found == expected, "a change that is meant: python -m tests.curves.record, and a line in CHANGELOG.md"
