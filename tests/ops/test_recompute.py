"""What is computed again in backward gives what autograd gives when it keeps everything."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairseq_ms.modules.config import LayerConfig
from fairseq_ms.modules.transformer import FeedForward, TransformerLayer
from fairseq_ms.ops.activation import ACTIVATIONS
from fairseq_ms.ops.linear import Linear
from fairseq_ms.ops.norm import norm_linear
from fairseq_ms.ops.recompute import (
    draw_seed,
    dropout,
    keep_mask,
    keep_prob,
    pointwise_linear,
    recomputed,
    scaled_mask,
)


def gradients(outputs: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a weighted sum of the outputs, so that no element counts the same."""
    weights = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=torch.float64).view_as(outputs).to(outputs.dtype)
    return list(torch.autograd.grad((outputs * weights).sum(), inputs))


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        # The same operations in float64; sums over rows may be taken in another order.
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activation_before_a_projection_equals_autograd(activation: str) -> None:
    function = ACTIVATIONS[activation]
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    linear = Linear(7, 4).double()
    inputs = [x, linear.weight, linear.bias]
    ours = pointwise_linear(function, linear.weight, linear.bias, x)
    plain = F.linear(function(x), linear.weight, linear.bias)
    assert_same([ours, *gradients(ours, inputs)], [plain, *gradients(plain, inputs)])


def test_a_projection_without_bias_and_two_inputs_equals_autograd() -> None:
    x, y = (torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(4, 14, dtype=torch.float64, requires_grad=True)

    def join(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.sin(), x * y], dim=-1)

    ours, plain = pointwise_linear(join, weight, None, x, y), F.linear(join(x, y), weight)
    assert_same([ours, *gradients(ours, [x, y, weight])], [plain, *gradients(plain, [x, y, weight])])


def test_layer_norm_before_a_projection_equals_autograd() -> None:
    norm, linear = nn.LayerNorm(7).double(), Linear(7, 4).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x, *norm.parameters(), *linear.parameters()]
    ours, plain = (norm_linear(x, norm, linear, recompute) for recompute in (True, False))
    assert_same([ours, *gradients(ours, inputs)], [plain, *gradients(plain, inputs)])


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_feed_forward_with_dropout_equals_autograd_over_the_same_mask(p: float, monkeypatch) -> None:
    block = FeedForward(LayerConfig(6, 10, 1, activation_dropout=p)).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *block.parameters()]
    monkeypatch.setattr("fairseq_ms.ops.activation.draw_seed", lambda: 99)
    ours = block(x)
    hidden = F.gelu(block.up(block.norm(x)))
    plain = block.down(hidden * scaled_mask(99, hidden.shape, p, hidden) if p else hidden)
    assert_same([ours, *gradients(ours, inputs)], [plain, *gradients(plain, inputs)])


def test_recomputed_equals_autograd() -> None:
    x, y = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y.t()).tanh()

    ours, plain = recomputed(function, x, y), function(x, y)
    assert_same([ours, *gradients(ours, [x, y])], [plain, *gradients(plain, [x, y])])


def test_a_function_with_a_backward_of_its_own_is_asked_for_it() -> None:
    class Doubled:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * x

        def backward(self, grad, x):
            return 2.0 * x, (100.0 * grad,)

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    plain = gradients(F.linear(2.0 * x, weight), [weight, x])
    ours = gradients(pointwise_linear(Doubled(), weight, None, x), [weight, x])
    assert_same(ours, [plain[0], 50.0 * plain[1]])


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_layer_under_autocast_has_bfloat16_gradients_near_those_of_float32(p: float) -> None:
    x = torch.randn(2, 70, 24, requires_grad=True)
    layer = TransformerLayer(LayerConfig(24, 48, 3, p, p, p))
    inputs = [x, *layer.parameters()]
    torch.manual_seed(5)
    exact = layer(x)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = layer(x)
    grads = gradients(rough, inputs)
    assert all(grad.dtype == torch.float32 for grad in grads)
    for a, b in zip([rough, *grads], [exact, *gradients(exact, inputs)], strict=True):
        # bfloat16 has 8 bits: a few roundings of 0.4% each, relative to the largest element.
        assert (a - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_keeps_the_wanted_share_and_the_mean(p: float, dtype: torch.dtype) -> None:
    count = 400_003
    mask = keep_mask(draw_seed(), (count,), p, torch.empty(0, dtype=dtype))
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert keep_prob(p) == pytest.approx(1.0 - p, abs=2**-17)
    # Five standard deviations of the mean of independent draws.
    assert mask.double().mean().item() == pytest.approx(1.0 - p, abs=5.0 * math.sqrt(p * (1.0 - p) / count) + 2**-16)
    assert scaled_mask(3, (count,), p, mask.double()).mean().item() == pytest.approx(1.0, abs=0.03)


def test_neighbours_in_a_mask_are_independent() -> None:
    mask = keep_mask(11, (400_000,), 0.5, torch.empty(0)).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8, 64):
        # The mean of 400,000 independent +-1/4 has a standard deviation of 0.0004.
        assert abs((mask[distance:] * mask[:-distance]).mean().item()) < 0.002


@pytest.mark.parametrize("p", [1e-9, 1.0 - 1e-9])
def test_extreme_probabilities_do_not_overflow(p: float) -> None:
    assert keep_mask(1, (1000,), p, torch.empty(0)).mean().item() == pytest.approx(1.0 - p, abs=0.01)


def test_dropout_uses_one_mask_for_both_directions() -> None:
    x = torch.ones(50, 41, requires_grad=True)
    y = dropout(x, 0.3, training=True)
    (grad,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(grad, y.detach())
    assert 0.0 < (y == 0.0).float().mean() < 1.0


def test_dropout_draws_another_mask_at_every_call_and_the_same_after_the_same_seed() -> None:
    x = torch.ones(500)
    torch.manual_seed(1)
    first, second = dropout(x, 0.5, training=True), dropout(x, 0.5, training=True)
    torch.manual_seed(1)
    again = dropout(x, 0.5, training=True)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_dropout_is_the_identity_in_evaluation() -> None:
    x = torch.randn(5)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0, training=True) is x


@pytest.mark.parametrize("recompute", [True, False])
def test_gradients_of_a_layer_with_dropout_are_its_slope(recompute: bool) -> None:
    layer = TransformerLayer(LayerConfig(12, 20, 3, 0.2, 0.3, 0.25, recompute=recompute)).double()
    x = torch.randn(2, 70, 12, dtype=torch.float64)
    direction = [torch.randn_like(parameter) for parameter in layer.parameters()]

    def loss(step: float) -> torch.Tensor:
        torch.manual_seed(9)
        moved = {name: value + step * towards for (name, value), towards in zip(layer.named_parameters(), direction)}
        return torch.func.functional_call(layer, moved, (x,)).sin().sum()

    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss(0.0), list(layer.parameters())), direction))
    difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    # Central differences err by 1e-10 times the third derivative, a few hundred here.
    torch.testing.assert_close(slope, difference.detach(), rtol=1e-6, atol=1e-6)


def test_recomputing_keeps_about_half_of_what_autograd_keeps() -> None:
    def kept(recompute: bool) -> int:
        storages = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        torch.manual_seed(1)
        layer = TransformerLayer(LayerConfig(48, 192, 4, recompute=recompute))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = layer(torch.randn(2, 64, 48, requires_grad=True))
        owned = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        del result
        return sum(t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in owned)

    unit = 2 * 64 * 48 * 4
    # x, queries, keys and values, x after attention, and four times its width in the middle: 1 + 3 + 1 + 4.
    assert kept(True) == 9 * unit
    assert kept(False) > 16 * unit
