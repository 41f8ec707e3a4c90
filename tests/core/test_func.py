"""Transforms of torch.func, torch.export and passes without gradients read the models as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_ms.core.ops import attention
from tests.core.test_model import NAMES, build
from tests.helpers.torch_versions import not_oldest

STILL = {"dropout": 0.0, "attention_dropout": 0.0}
# Of an LSTM's gradients, torch.func has none.
SOME = ["Vanilla", "Retina, groups", "TopDown", "BottomUp", "TransformerXL", "TransformerQL"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_without_gradients_has_the_masks_of_one_with_them(name: str) -> None:
    model, tokens, found = build(name, dropout=0.3).train(), torch.randint(11, (2, 23)), []
    for enabled in (True, False):
        torch.manual_seed(2)
        with torch.set_grad_enabled(enabled):
            found.append(model.features(tokens).detach())
    assert found[0].equal(found[1])


@pytest.mark.parametrize("what", ["dropout", "attention_dropout", "activation_dropout"])
def test_gradients_of_a_reentrant_checkpoint_are_those_of_its_loss(what: str) -> None:
    model: Any = build("Vanilla", **{**STILL, what: 0.3}).double().train()
    layer = model.stack.layers[0]
    x = torch.randn(2, 9, 24, dtype=torch.double, requires_grad=True)

    found: list[Tensor] = []
    for again in (True, False):
        torch.manual_seed(3)
        x.grad = None
        (checkpoint(layer, x, use_reentrant=True) if again else layer(x)).sin().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert found[0].equal(found[1])


@not_oldest
@pytest.mark.parametrize("name", SOME)
def test_rows_side_by_side_and_gradients_of_functions_are_those_of_calls(name: str) -> None:
    model, tokens = build(name, **STILL).double(), torch.randint(11, (3, 1, 9))
    expected = torch.stack([model.features(row) for row in tokens])
    torch.testing.assert_close(torch.func.vmap(model.features)(tokens), expected, rtol=0.0, atol=1e-12)
    weights = {key: weight.detach() for key, weight in model.named_parameters()}
    attention._shares.cache_clear()

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (tokens[0],))[0].logsumexp(-1).sum()

    found = torch.func.grad(loss)(weights)
    model(tokens[0])[0].logsumexp(-1).sum().backward()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[key], parameter.grad, rtol=0.0, atol=1e-11)


@not_oldest
@pytest.mark.parametrize("name", ["TransformerXL", "CompressiveTransformer", "TransformerQL"])
def test_an_exported_model_goes_on_as_before(name: str) -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(name).double()

        def forward(self, tokens_BT: Tensor) -> Tensor:
            return self.model(tokens_BT)[0]

    own, tokens = Logits().eval(), torch.randint(11, (2, 9))
    exported = torch.export.export(own, (tokens,)).module()
    torch.testing.assert_close(exported(tokens), build(name).double()(tokens)[0], rtol=0.0, atol=1e-12)
    assert own(tokens).equal(build(name).double()(tokens)[0])
