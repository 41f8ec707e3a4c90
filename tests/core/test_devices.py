"""Where tensors are made: beside those that a call is given, whatever torch's default device and the weights say."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fairseq_ms.core.ops import flash_windows
from tests.core.ops import flash_kernels, naive
from tests.core.test_model import ADAPTIVE, NAMES, build
from tests.helpers.torch_versions import not_oldest

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
PARTS: dict[str, Any] = {"positions": "rotary", "dim": 48, "qk_norm": "scaled", "short_conv": 2, "sinks": True}
LOCAL: dict[str, Any] = {"decoder": "transformer", "decoder_units": 24, "short_conv": 2, "sinks": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    *((name, PARTS) for name in ("Vanilla", "TopDown", "BottomUp", "Retina, open")),
    ("Vanilla", ADAPTIVE),
    ("HAED", LOCAL),
    ("HAED", {"segmentation": "fixed", "separators": ()}),
]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """A default device on which nothing is."""
    before = torch.empty(0).device
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None if before.type == "cpu" else before)


def on_cpu(name: str, changes: dict[str, Any]) -> Any:
    with torch.device("cpu"):
        return build(name, **{**DROPOUT, **changes}), torch.randint(11, (2, 21))


@pytest.mark.cpu
@not_oldest
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_models_make_nothing_on_the_default_device(name: str, changes: dict[str, Any], elsewhere: None) -> None:
    model, tokens = on_cpu(name, changes)
    model.train().loss(tokens, tokens).backward()
    assert all(weight.grad is None or weight.grad.is_cpu for weight in model.parameters())
    with torch.no_grad():
        _, state = model.eval()(tokens)
        state.reorder(torch.tensor([1, 0], device="cpu"))
        assert model(tokens, state.copy())[0].is_cpu
    assert model.generate(tokens, 5, 1.0, 3, 0.9).is_cpu
    assert all(text.is_cpu for text in model.generate(list(tokens), 5, 0.0, eos_idx=2))


@pytest.mark.cpu
def test_twins_and_checks_of_kernels_make_nothing_on_the_default_device(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(flash_windows, "_forward", flash_kernels.forward)
    monkeypatch.setattr(flash_windows, "_backward", flash_kernels.backward)
    assert flash_windows._agrees.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert not recwarn
    with torch.device("cpu"):
        q, x = torch.randn(1, 2, 9, 4), torch.randn(2, 3, 8)
    assert naive.window_attention(q, q, q, 1, 0, 3).is_cpu
    assert naive.attention(q, q, q, causal=True).is_cpu
    assert naive.rotate(x, range(3), 2, 4, 100.0).is_cpu
    assert naive.short_conv(x, x[0]).is_cpu


def offloaded(model: torch.nn.Module) -> None:
    """Have weights on the meta device but while the module that owns them is called, as libraries offload them."""
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        empty = {name: torch.nn.Parameter(weight.detach().to("meta")) for name, weight in own.items()}
        forward = module.forward

        def called(
            *inputs: Any, module: Any = module, own: Any = own, empty: Any = empty, forward: Any = forward, **named: Any
        ) -> Any:
            module._parameters.update(own)
            try:
                return forward(*inputs, **named)
            finally:
                module._parameters.update(empty)

        module.forward = called
        module._parameters.update(empty)


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_models_generate_where_tokens_are_whose_weights_are_brought_there_module_by_module(
    name: str, changes: dict[str, Any]
) -> None:
    # Attention reads its sinks itself, which belong to what normalises queries and keys.
    model, tokens = on_cpu(name, {key: value for key, value in changes.items() if key != "sinks"})
    expected = model.generate(tokens, 12, 0.0), model.generate(list(tokens), 7, 0.0)
    offloaded(model)
    assert model.generate(tokens, 12, 0.0).equal(expected[0])
    assert all(one.equal(other) for one, other in zip(model.generate(list(tokens), 7, 0.0), expected[1], strict=True))
    state = model(tokens)[1]
    assert model.generate(expected[0][:, 21:23], 10, 0.0, state=state).equal(expected[0][:, 21:])
