"""Which parameters are matrices of layers, and Muon and AdamW for the two kinds as one optimizer."""

import copy
import itertools
from typing import Any

import pytest
import torch

from fairseq_ms import core
from fairseq_ms.core.iem import ImplicitEmbedding
from fairseq_ms.core.optimizers import rows_of_projections
from tests.core.test_model import ADAPTIVE, NAMES, build

# No width of these models.
SYMBOLS = 37
UNTIED = {"tie_embeddings": False}
CASES = [
    *((name, {}) for name in NAMES),
    *((name, UNTIED) for name in ("Vanilla", "Retina", "TransformerXL")),
    *(("Vanilla", {**ADAPTIVE, "tie_adaptive_weights": tied}) for tied in (False, True)),
    ("HAED", {"decoder": "transformer"}),
    ("TopDown", {"downsampler": "conv"}),
]
NO_MATRIX = ("embed", "places", "positions", "project.", "adaptive_softmax", "lstm.cell", "norm", "bias")

# Queries, keys and values share their weight; so do a coarse scale's keys and values.
SEVERAL = ("qkv", "attention.fine", "attention.coarse", "aggregate.coarse", "aggregate.attention.coarse")


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_every_parameter_is_in_one_group_and_projections_within_the_model_are_matrices(
    name: str, changes: dict[str, Any]
) -> None:
    model = build(name, vocab_size=SYMBOLS, **changes)
    matrices, others = core.matrices_and_others(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert len(names) == len(matrices) + len(others)
    assert set(names) == {*matrices, *others}
    for parameter in matrices:
        assert parameter.dim() == 2
        assert SYMBOLS not in parameter.shape
        assert not any(part in names[parameter] for part in NO_MATRIX), names[parameter]
    rows = rows_of_projections(model)
    assert list(rows) == matrices
    for parameter, sizes in rows.items():
        assert sum(sizes) == parameter.size(0)
        assert (len(sizes) > 1) == any(part in names[parameter] for part in SEVERAL), names[parameter]
    for parameter in others:
        named = names[parameter] in ("u", "v") or any(part in names[parameter] for part in NO_MATRIX)
        assert named, names[parameter]


def test_the_first_phase_of_haed_has_its_encoder_and_main_model() -> None:
    model = ImplicitEmbedding(core.HAEDConfig(vocab_size=SYMBOLS, separators=(3,), layers=1), projected=True)
    matrices, others = core.matrices_and_others(model)
    # Two of the encoder, four of the layer, and the projection that is compared with encodings.
    assert len(matrices) == 7
    assert len(others) == len(list(model.parameters())) - 7


def updates(model: core.CausalModel, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + first + update))
    for update in range(first, first + count):
        tokens = torch.randint(SYMBOLS, (2, 17), generator=torch.Generator().manual_seed(update))
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", ["Retina", "TransformerQL", "HAED"])
def test_muon_and_adamw_are_torchs_two_optimizers_over_single_projections(name: str) -> None:
    model = build(name, vocab_size=SYMBOLS)
    naive = copy.deepcopy(model)
    updates(model, core.muon_and_adamw(model, 0.02, 0.005, 0.1, (0.8, 0.9)), 3)
    rows, (_, others) = rows_of_projections(naive), core.matrices_and_others(naive)
    pieces = {weight: [torch.nn.Parameter(part) for part in weight.detach().split(rows[weight])] for weight in rows}
    two = [
        torch.optim.Muon(itertools.chain(*pieces.values()), lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.005, weight_decay=0.1, betas=(0.8, 0.9), fused=True),
    ]
    for update in range(3):
        tokens = torch.randint(SYMBOLS, (2, 17), generator=torch.Generator().manual_seed(update))
        naive.zero_grad()
        naive.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        for weight, parts in pieces.items():
            for part, gradient in zip(parts, weight.grad.split(rows[weight]), strict=True):  # type: ignore[union-attr]
                part.grad = gradient
        for optimizer, rate in zip(two, (0.02, 0.005), strict=True):
            optimizer.param_groups[0]["lr"] = rate / (1 + update)
            optimizer.step()
    for found, expected in zip(model.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_training_by_muon_and_adamw_resumes_bit_for_bit() -> None:
    whole = build("Retina", vocab_size=SYMBOLS)
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    updates(whole, core.muon_and_adamw(whole, 0.02, 0.005), 4)
    updates(first, half := core.muon_and_adamw(first, 0.02, 0.005), 2)
    second.load_state_dict(first.state_dict())
    resumed = core.muon_and_adamw(second, 0.02, 0.005)
    resumed.load_state_dict(copy.deepcopy(half.state_dict()))
    updates(second, resumed, 2, first=2)
    for found, expected in zip(second.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_without_torchs_muon_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"^Muon needs torch 2\.9 or newer: this is torch \d"):
        core.muon_and_adamw(build("Vanilla"), 0.02, 0.005)
