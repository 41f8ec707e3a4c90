"""Which parameters are matrices of layers, and Muon and AdamW for the two kinds as one optimizer."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fairseq_ms import core
from fairseq_ms.core.hierarchical.iem import ImplicitEmbedding
from fairseq_ms.core.optimizers import MuonAndAdamW, rows_of_projections
from tests.core.test_model import ADAPTIVE, NAMES, build
from tests.helpers.operations import Operations

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon, of torch 2.9")
# No width of these models.
SYMBOLS = 37
UNTIED = {"tie_embeddings": False}
CASES = [
    *((name, {}) for name in NAMES),
    *((name, UNTIED) for name in ("Vanilla", "Retina", "TransformerXL")),
    *(("Vanilla", {**ADAPTIVE, "tie_adaptive_weights": tied}) for tied in (False, True)),
    ("HAED", {"decoder": "transformer"}),
    ("TopDown", {"downsampler": "conv"}),
    ("BottomUp", SCORES := {"qk_norm": "scaled", "sinks": True, "short_conv": 2}),
]
NO_MATRIX = (
    "embed",
    "places",
    "positions",
    "project.",
    "adaptive_softmax",
    "lstm.cell",
    "norm",
    "bias",
    "qk.",
    "short_conv",
)

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


@needs_muon
def test_the_scores_of_heads_are_not_decayed() -> None:
    model = build("BottomUp", vocab_size=SYMBOLS, **SCORES)
    optimizer = core.muon_and_adamw(model, 0.02, 0.005, weight_decay=0.5)
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    same = [name for name, now in model.state_dict().items() if now.equal(before[name]) and now.any()]
    scores = [name for name in before if name.endswith((".temperature", ".sinks"))]
    assert same == scores != []


def updates(model: core.CausalModel, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + first + update))
    for update in range(first, first + count):
        tokens = torch.randint(SYMBOLS, (2, 17), generator=torch.Generator().manual_seed(update))
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        schedule.step()


def assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    torch.testing.assert_close(list(found.parameters()), list(expected.parameters()), rtol=0, atol=0)


OTHERWISE = {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-2}


@needs_muon
@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in NAMES), ("Retina", OTHERWISE)])
def test_muon_and_adamw_are_torchs_two_optimizers_over_single_projections(name: str, settings: dict[str, Any]) -> None:
    model = build(name, vocab_size=SYMBOLS)
    naive = copy.deepcopy(model)
    muon = {**settings, "weight_decay": 0.1}
    of_adamw: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.8, 0.9)}
    rows, (_, others) = rows_of_projections(model), core.matrices_and_others(model)
    ours = MuonAndAdamW(rows, others, 0.02, 0.005, muon, of_adamw)
    schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1 / (1 + step))
    rows, (_, others) = rows_of_projections(naive), core.matrices_and_others(naive)
    pieces = {weight: [torch.nn.Parameter(part) for part in weight.detach().split(rows[weight])] for weight in rows}
    two = [
        torch.optim.Muon(itertools.chain(*pieces.values()), lr=0.02, **muon),
        torch.optim.AdamW(others, lr=0.005, fused=True, **of_adamw),
    ]
    for update in range(3):
        tokens = torch.randint(SYMBOLS, (2, 17), generator=torch.Generator().manual_seed(update))
        naive.zero_grad()
        naive.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        # The same numbers: products of matrices that lie elsewhere in memory may differ in their last bits.
        for own, twin in zip(model.parameters(), naive.parameters(), strict=True):
            own.grad = None if twin.grad is None else twin.grad.clone()
        ours.step()
        schedule.step()
        for weight, parts in pieces.items():
            # What compresses memories has no gradient by this loss, and stays as it is.
            gradients = [None] * len(parts) if weight.grad is None else weight.grad.split(rows[weight])
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient
        for optimizer, rate in zip(two, (0.02, 0.005), strict=True):
            optimizer.param_groups[0]["lr"] = rate / (1 + update)
            optimizer.step()
    # The products' eight bits: a batch of them may be rounded otherwise, by one of 2**8 of a rate, in every update.
    torch.testing.assert_close(list(model.parameters()), list(naive.parameters()), rtol=0, atol=3 * 0.02 * 2**-8)


@needs_muon
def test_an_update_of_more_layers_takes_no_more_launches() -> None:
    counts = []
    for layers in (1, 3):
        model = build("Vanilla", vocab_size=SYMBOLS, layers=layers)
        updates(model, optimizer := core.muon_and_adamw(model, 0.02, 0.005), 1)
        with Operations() as operations:
            optimizer.step()
        counts.append(len(operations.kernels))
    assert counts[0] == counts[1] > 0


@needs_muon
@pytest.mark.parametrize("older", [False, True])
def test_a_training_by_muon_and_adamw_resumes_bit_for_bit(older: bool) -> None:
    whole = build("Retina", vocab_size=SYMBOLS)
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    updates(whole, core.muon_and_adamw(whole, 0.02, 0.005), 4)
    updates(first, half := core.muon_and_adamw(first, 0.02, 0.005), 2)
    second.load_state_dict(first.state_dict())
    resumed = core.muon_and_adamw(second, 0.02, 0.005)
    state = copy.deepcopy(half.state_dict())
    if older:
        del state["param_groups"][0]["rows"]
    resumed.load_state_dict(state)
    updates(second, resumed, 2, first=2)
    assert_same(second, whole)


@needs_muon
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_model_and_optimizer_goes_on_as_they_do(copied: Callable[[Any], Any]) -> None:
    model = build("Retina", vocab_size=SYMBOLS)
    optimizer = core.muon_and_adamw(model, 0.02, 0.005)
    updates(model, optimizer, 2)
    other, its_own = copied((model, optimizer))
    for each, steps in ((model, optimizer), (other, its_own)):
        updates(each, steps, 2, first=2)
        steps.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 2))], "rows": [(1, 2)]})
    assert_same(model, other)
    torch.testing.assert_close(optimizer.state_dict()["state"], its_own.state_dict()["state"], rtol=0, atol=0)


@needs_muon
def test_added_groups_are_adamws_unless_they_have_rows() -> None:
    model = build("Vanilla", vocab_size=SYMBOLS)
    rows = rows_of_projections(model)
    (late, its_rows), *first = rows.items()
    others = core.matrices_and_others(model)[1]
    naive = copy.deepcopy(model)
    updates(naive, core.muon_and_adamw(naive, 0.02, 0.005, 0.1), 3)
    adamw = {"weight_decay": 0.1}
    optimizer = MuonAndAdamW(dict(first), others[1:], 0.02, 0.005, {"weight_decay": 0.1}, adamw)
    optimizer.add_param_group({"params": others[0]})
    optimizer.add_param_group({"params": [late], "rows": [its_rows]})
    updates(model, optimizer, 3)
    assert_same(model, naive)
    for wrong in ({"params": [torch.nn.Parameter(torch.ones(3))], "rows": [(3,)]}, {"params": [late], "rows": [(1,)]}):
        with pytest.raises(ValueError, match="rows must be"):
            MuonAndAdamW(dict(first), others, 0.02, 0.005, {}, {}).add_param_group(wrong)
    rates = [group["initial_lr"] for group in optimizer.param_groups]
    assert rates == [0.02, 0.005, 0.005, 0.02]
    # Schedulers that turn momentum, too, look for one in every group.
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.005, 0.005, 0.02], total_steps=5)
    updates(model, optimizer, 1)
    cycle.step()


def test_without_torchs_muon_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(RuntimeError, match=r"^Muon needs torch 2\.9 or newer: this is torch \d"):
        core.muon_and_adamw(build("Vanilla"), 0.02, 0.005)
