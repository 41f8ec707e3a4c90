"""What is computed again in backward gives what autograd gives when it keeps everything."""

import math

import pytest
import torch

from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.layers import TransformerLayer
from fairseq_ms.core.ops.recompute import (
    DropoutMasks,
    draw_seed,
    keep_mask,
    keep_prob,
)
from fairseq_ms.core.transformer_ql import draw_uniform
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.helpers.gradients import gradients


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_layer_under_autocast_has_bfloat16_gradients_near_those_of_float32(p: float) -> None:
    x = torch.randn(2, 70, 24, requires_grad=True)
    # On a GPU, each precision has a kernel of attention with masks of its own.
    in_attention = p if x.device.type == "cpu" else 0.0
    layer = TransformerLayer(
        LayerConfig(dim=24, ffn_dim=48, heads=3, dropout=p, attention_dropout=in_attention, activation_dropout=p)
    )
    inputs = [x, *layer.parameters()]
    torch.manual_seed(5)
    exact = layer(x)
    torch.manual_seed(5)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
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
    mask = keep_mask(draw_seed(), p, torch.empty(count, dtype=dtype))
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert keep_prob(p) == pytest.approx(1.0 - p, abs=2**-17)
    # Five standard deviations of the mean of independent draws.
    assert mask.double().mean().item() == pytest.approx(1.0 - p, abs=5.0 * math.sqrt(p * (1.0 - p) / count) + 2**-16)
    assert DropoutMasks(p).scaled(mask.double()).mean().item() == pytest.approx(1.0, abs=0.03)


def test_neighbours_in_a_mask_are_independent() -> None:
    mask = keep_mask(11, 0.5, torch.empty(400_000)).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8, 64):
        # The mean of 400,000 independent +-1/4 has a standard deviation of 0.0004.
        assert abs((mask[distance:] * mask[:-distance]).mean().item()) < 0.002


@pytest.mark.parametrize("p", [1e-9, 1.0 - 1e-9])
def test_extreme_probabilities_do_not_overflow(p: float) -> None:
    assert keep_mask(1, p, torch.empty(1000)).mean().item() == pytest.approx(1.0 - p, abs=0.01)


def test_seeds_are_drawn_on_the_cpu_whatever_the_default_device() -> None:
    drawn = []
    for device in ("cpu", "meta"):
        torch.manual_seed(1)
        # A tensor of the meta device has no number to give away; one of a GPU would have to be waited for.
        with torch.device(device):
            drawn.append((draw_seed(), draw_uniform()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("recompute", [True, False])
def test_gradients_of_a_layer_with_dropout_are_its_slope(recompute: bool) -> None:
    layer = TransformerLayer(
        LayerConfig(
            dim=12,
            ffn_dim=20,
            heads=3,
            dropout=0.2,
            attention_dropout=0.3,
            activation_dropout=0.25,
            recompute=recompute,
        )
    ).double()
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


@pytest.mark.cpu
def test_recomputing_keeps_about_half_of_what_autograd_keeps() -> None:
    def kept(recompute: bool) -> int:
        layer = TransformerLayer(LayerConfig(dim=48, ffn_dim=192, heads=4, recompute=recompute))
        x = torch.randn(2, 64, 48, requires_grad=True)
        return saved_bytes(lambda: layer(x), layer)

    unit = 2 * 64 * 48 * 4
    # x, queries, keys, values, what they give, x after attention, and four times its width in the middle: 1 + 3 + 1 +
    # 1 + 4; of every query and head, the logarithm of a sum.
    assert kept(True) == 10 * unit + 2 * 64 * 4 * 4
    assert kept(False) > 16 * unit
