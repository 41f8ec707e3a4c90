"""``model.compile``: layer by layer, for every length, with the numbers of the model that is not compiled."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fairseq_ms import core
from fairseq_ms.core.layers import GRAPHS
from fairseq_ms.core.ops import flash_windows, window_attention
from tests.core.ops import flash_kernels
from tests.core.test_model import build

WINDOWS = (core.Scale(1, near=0, far=5), core.Scale(4, near=4, far=16))
SCALES = (core.Scale(1, layers=1), core.Scale(4, layers=1))
PLAIN: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
ALL = {
    "positions": "rotary",
    "norm": "rms",
    "activation": "swiglu",
    "qk_norm": "scaled",
    "short_conv": 3,
    "sinks": True,
}
# What the compiler keeps for backward is its own affair, so masks are torch's, in the order of torch's own layers.
DROPPED = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.1, "recompute": False}
SMALL: dict[str, Any] = {
    "Vanilla": {"layers": 2},
    "Retina": {"layers": 2, "scales": WINDOWS},
    "TopDown": {"scales": SCALES},
    "BottomUp": {"scales": SCALES},
}
CASES = [
    *((name, kind, False) for name in SMALL for kind in ({**PLAIN, **ALL}, DROPPED)),
    *((name, kind, False) for name in ("CoarseLM", "HAED") for kind in (PLAIN, DROPPED)),
    ("Retina", {**PLAIN, **ALL, "scales": WINDOWS[:1]}, True),
    ("Retina", PLAIN, True),
]
# Compiling takes most of them ten seconds and more.
QUICK = ("Vanilla", "TopDown")
MARKED = [case if case[0] in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES[:-1]] + CASES[-1:]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Nothing is compiled before or after, and graphs are counted from none."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def results(model: core.CausalModel, length: int, seed: int) -> list[torch.Tensor]:
    """The loss of a text and the gradients of all parameters, then the logits."""
    tokens = torch.randint(11, (2, length + 1), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(grad for grad in gradients if grad is not None), model(tokens[:, :-1])[0].detach()]


@pytest.mark.parametrize(("name", "changes", "flash"), MARKED)
def test_a_compiled_model_has_the_losses_and_gradients_of_one_that_is_not(
    name: str, changes: dict[str, Any], flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole graphs, and no further one for a length that has been before, whatever the tokens; windows by flash
    kernels, too, for which their twins stand in."""
    if flash:
        monkeypatch.setattr(window_attention, "precision", lambda x: x.dtype)
        monkeypatch.setattr(flash_windows, "_forward", flash_kernels.forward)
        monkeypatch.setattr(flash_windows, "_backward", flash_kernels.backward)
    model = build(name, **{**SMALL.get(name, {}), **changes}).double().train()
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for seed, length in enumerate((33, 47, 21)):
        # float64: the compiled model adds up in another order.
        found, expected = results(compiled, length, seed), results(model, length, seed)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not counters["graph_break"]
    count = graphs()
    assert count
    for seed, length in enumerate((33, 21, 47), start=3):
        results(compiled, length, seed)
    assert graphs() == count


CLOSED = (core.Scale(1, far=16),)
OPEN, BLOCKS = (*CLOSED, core.Scale(1)), (*CLOSED, core.Scale(4, near=16, far=64))


@pytest.mark.parametrize(
    ("name", "changes", "most", "backend"),
    [
        ("Vanilla", {}, 2, "aot_eager"),
        ("Vanilla", {}, 2, "eager"),
        pytest.param("Vanilla", {}, 2, "inductor", marks=pytest.mark.slow),
        pytest.param("TopDown", {"scales": SCALES}, 3, "aot_eager", marks=pytest.mark.slow),
        *(
            pytest.param("Retina", {"scales": scales}, most, backend, marks=pytest.mark.slow)
            for scales, most, backend in (
                *((CLOSED, 3, "aot_eager"), (OPEN, 3, "aot_eager"), (BLOCKS, 4, "aot_eager")),
                (CLOSED, 4, "inductor"),
            )
        ),
    ],
)
def test_lengths_share_a_graph_but_the_first_and_the_shortest(
    name: str, changes: dict[str, Any], most: int, backend: str
) -> None:
    """As docs/core.md counts them."""
    layers = {} if name == "TopDown" else {"layers": 1}
    model = build(name, **layers, **changes, **PLAIN, max_positions=512).double().train()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=backend, fullgraph=True)
    for seed, length in enumerate((64, 65, 96, 128, 300, 3)):
        found, expected = results(compiled, length, seed), results(model, length, seed)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert graphs() <= most


@pytest.mark.parametrize("downsampler", ["avg", "max", "conv"])
@pytest.mark.parametrize("name", ["Retina", "TopDown", "BottomUp"])
def test_where_no_block_is_whole_nothing_is_computed_of_none_and_everything_has_a_gradient(
    name: str, downsampler: str
) -> None:
    """A compiler has no operation on no positions; distributed training waits for every gradient."""
    kinds = {**SMALL[name], **PLAIN, "qk_norm": True, "positions": "rotary", "downsampler": downsampler}
    model, sizes = build(name, **kinds).train(), list[int]()
    for module in model.modules():
        if not [*module.children()]:
            module.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    for length in (1, 3):
        model.zero_grad()
        results(model, length, length)
        assert all(sizes), length
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert sizes


@pytest.mark.slow
@pytest.mark.parametrize("downsampler", ["avg", "max", "conv"])
def test_a_text_shorter_than_a_block_follows_a_longer_one(downsampler: str) -> None:
    """By the default backend, which makes code of what the others only trace."""
    model = build("Retina", layers=1, scales=WINDOWS, **PLAIN, downsampler=downsampler).double().train()
    compiled = copy.deepcopy(model)
    compiled.compile()
    for seed, length in enumerate((33, 2, 3)):
        found, expected = results(compiled, length, seed), results(model, length, seed)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_layers_of_a_kind_share_one_graph_and_nothing_else_is_compiled() -> None:
    model = build("Vanilla", layers=5, **PLAIN)
    model.compile(backend="aot_eager", fullgraph=True)
    tokens = torch.randint(11, (2, 20))
    whole, _ = model(tokens)
    assert graphs() == 1
    counters.clear()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(tokens)[0], whole)
    state = model.new_state(2, 20)
    pieces = torch.cat([model(piece, state)[0] for piece in tokens.split([9, 1, 10], dim=1)], dim=1)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)
    model.generate(tokens, 3, temperature=0.0)
    assert not graphs()


def test_where_torch_compile_has_no_limit_of_its_own_that_of_the_process_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch's own patch: monkeypatch finds no such attribute in the module's __dict__, and would leave it deleted.
    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"

    def without(function: Any, backend: str = "inductor") -> Any:
        return function

    monkeypatch.setattr(torch, "compile", without)
    for before, after in ((8, GRAPHS), (100, 100)):
        with config.patch({name: before}):
            build("Vanilla").compile()
            assert getattr(config, name) == after


def test_a_model_without_layers_to_compile_says_so() -> None:
    with pytest.raises(ValueError, match="HRED"):
        build("HRED").compile()


@pytest.mark.parametrize(
    ("first", "second"), [(33, 64), *(pytest.param(*both, marks=pytest.mark.slow) for both in [(64, 128), (512, 256)])]
)
def test_a_compiled_retina_goes_on_with_another_length(first: int, second: int) -> None:
    """Through closed windows, blocks and an open end."""
    windows = (*WINDOWS, core.Scale(4, near=16, far=None))
    model = build("Retina", layers=1, scales=windows, max_positions=512, **PLAIN).double().train()
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager")
    for length in (first, second):
        expected = results(model, length, length)
        torch.testing.assert_close(results(compiled, length, length), expected, rtol=1e-9, atol=1e-9)
