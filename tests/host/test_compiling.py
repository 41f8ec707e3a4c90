"""`--compile` under fairseq's trainer: the same losses, from layers that are compiled, in training alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fairseq_ms.errors import UsageError
from fairseq_ms.models.iem import IEM_CRITERION
from tests.helpers.resumed import HAED, TINY
from tests.optim.test_of_torch import VANILLA, batches, data, trained, trainer_of

__all__ = ["data"]
FIRST_PHASE = (*HAED, *TINY, "--token-embed-dim", "4", "--decoder-layers", "2", "--position-embed-dim", "2")
CHUNKS = ("--arch", "hred", "--segmentation", "fixed", "--decoder-units", "8", "--encoder-units", "8")


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of torch.compile, run as they are."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("precision", ["none", "bf16"])
def test_a_compiled_training_has_the_losses_of_one_that_is_not(precision: str, data: Path) -> None:
    changes: dict[str, Any] = {} if precision == "none" else {precision: True}
    found, expected = (
        trained(trainer_of(data, *VANILLA, "--optimizer", "adamw", "--lr", "0.01", *flags, **changes), batches(3))
        for flags in (("--compile",), ())
    )
    # In half precision a layer rounds elsewhere when a compiler has fused it.
    assert found == pytest.approx(expected, rel=1e-5 if precision == "none" else 1e-2)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_first_phase_which_has_no_decoder_is_compiled_as_well(data: Path) -> None:
    flags = (
        "--arch",
        "haed",
        "--criterion",
        IEM_CRITERION,
        "--negative-batches",
        "0",
        *FIRST_PHASE,
        "--optimizer",
        "adamw",
        "--lr",
        "0.01",
    )
    found, expected = (trained(trainer_of(data, *flags, *more), batches(3)) for more in (("--compile",), ()))
    assert found == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"]


def test_a_model_without_a_transformer_refuses_to_be_compiled(data: Path) -> None:
    with pytest.raises(UsageError, match=r"^--compile "):
        trainer_of(data, *CHUNKS, "--compile")
