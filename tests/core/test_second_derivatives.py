"""Gradients of gradients, as penalties and meta-learning have them: right, or refused in a sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fairseq_ms import core
from fairseq_ms.core.streaming import StreamingModel
from tests.core.test_model import build
from tests.core.test_wrapped import CASES, TOKENS, small

TWO: dict[str, Any] = {"layers": 2, "init_std": 0.1, "dropout": 0.0, "attention_dropout": 0.0}
MORE: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2},
    "checkpoint": {"checkpoint": True},
    "all else": {"positions": "rotary", "norm": "rms", "qk_norm": "scaled", "short_conv": 3, "sinks": True},
}
LSTMS = ("haed", "hred")


def penalty(model: core.CausalModel) -> Tensor:
    """The square of the gradient's length, as ``torch.autograd.grad`` has it."""
    torch.manual_seed(2)
    # No gradient goes to the memory of a segment before.
    length = 8 if isinstance(model, StreamingModel) else 17
    loss = model(TOKENS[:, :length])[0].sin().mean()
    grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True, allow_unused=True)
    return torch.stack([grad.square().sum() for grad in grads if grad is not None]).sum()


@pytest.mark.parametrize("which", [*(which for which in CASES if which not in LSTMS), *MORE])
def test_the_gradient_of_a_penalty_is_its_slope(which: str) -> None:
    model = build("Vanilla", **{**TWO, **MORE[which]}).double().train() if which in MORE else small(which)
    weights = [*model.parameters()]
    towards = [torch.randn_like(weight) for weight in weights]
    for module in model.modules():  # a padding symbol's embedding has no gradient
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            towards[[weight is module.weight for weight in weights].index(True)][module.padding_idx] = 0.0
    # Of torch's kernels for attention, the plain one has second derivatives.
    with sdpa_kernel(SDPBackend.MATH):
        grads = torch.autograd.grad(penalty(model), weights, allow_unused=True)
        slope = torch.stack([(grad * way).sum() for grad, way in zip(grads, towards) if grad is not None]).sum()
        found = []
        for step in (1e-7, -2e-7):
            with torch.no_grad():
                for weight, way in zip(weights, towards):
                    weight.add_(way, alpha=step)
            found.append(penalty(model).detach())
    # Central differences err by 1e-14 times third derivatives, and by roundings over 1e-7.
    torch.testing.assert_close(slope, (found[0] - found[1]) / 2e-7, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", LSTMS)
def test_a_second_derivative_that_there_is_not_is_refused(which: str) -> None:
    with pytest.raises(RuntimeError, match="an LSTM has no second derivative"):
        penalty(small(which))
