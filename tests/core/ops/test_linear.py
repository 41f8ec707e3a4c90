"""Layer norm, activation and dropout in front of a projection give what autograd gives when it keeps everything."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.ops.linear import (
    ACTIVATIONS,
    NORMS,
    FeedForward,
    Norm,
    activation_linear,
    norm_linear,
    norm_linear_and_normed,
)
from fairseq_ms.core.ops.recompute import scaled_mask
from tests.helpers.gradients import assert_same_with_gradients, gradients


def parameters(*modules: nn.Module) -> list[Tensor]:
    return [parameter for module in modules for parameter in module.parameters()]


def random_norm(dim: int, kind: str = "layer") -> Norm:
    norm = NORMS[kind](dim).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activation_and_dropout_before_a_projection_equal_autograd(
    activation: str, p: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairseq_ms.core.ops.recompute.draw_seed", lambda: 99)
    x = torch.randn(3, 5, 14, dtype=torch.float64, requires_grad=True)
    linear = nn.Linear(ACTIVATIONS[activation](x).size(-1), 4, bias).double()
    inputs = [x, *linear.parameters()]
    ours = activation_linear(x, activation, p, linear, recompute=True)
    hidden = ACTIVATIONS[activation](x)
    plain = F.linear(hidden * scaled_mask(99, hidden.shape, p, hidden) if p else hidden, *linear.parameters())
    assert_same_with_gradients(ours, plain, inputs)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_before_a_projection_equals_autograd(bias: bool, kind: str) -> None:
    norm, linear = random_norm(7, kind), nn.Linear(7, 4, bias).double()
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x, *parameters(norm, linear)]
    ours, plain = (norm_linear(x, norm, linear, recompute) for recompute in (True, False))
    assert_same_with_gradients(ours, plain, inputs)


@pytest.mark.parametrize("kind", NORMS)
def test_a_normalised_input_that_others_use_too_passes_both_gradients_on(kind: str) -> None:
    norm, linear = random_norm(7, kind), nn.Linear(7, 4).double()
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    ours, plain = (
        torch.cat([projected, normed.sin()], dim=-1)
        for projected, normed in (norm_linear_and_normed(x, norm, linear, recompute) for recompute in (True, False))
    )
    assert_same_with_gradients(ours, plain, [x, *parameters(norm, linear)])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_under_autocast_is_normalised_again_in_the_type_that_it_was(dtype: torch.dtype, kind: str) -> None:
    block = FeedForward(24, 48, "gelu", 0.0, kind)
    x = torch.randn(2, 9, 24).to(dtype).requires_grad_()
    inputs, both = [x, *block.parameters()], []
    for block.recompute in (True, False):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            result = block(x)
        both.append([result, *gradients(result, inputs)])
    for one, other in zip(*both, strict=True):
        assert one.dtype == other.dtype
        # bfloat16 has 8 bits: a few roundings of 0.4% each, relative to the largest element.
        assert (one - other).abs().max() <= 0.02 * other.abs().max()


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_feed_forward_with_dropout_equals_autograd_over_the_same_mask(
    p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = FeedForward(6, 10, "gelu", p).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *block.parameters()]
    monkeypatch.setattr("fairseq_ms.core.ops.recompute.draw_seed", lambda: 99)
    ours = block(x)
    hidden = F.gelu(block.up(block.norm(x)))
    plain = block.down(hidden * scaled_mask(99, hidden.shape, p, hidden) if p else hidden)
    assert_same_with_gradients(ours, plain, inputs)
