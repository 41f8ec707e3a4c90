"""Layer norm, activation and dropout in front of a projection give what autograd gives when it keeps everything."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_ms.core.cache import LastInputs
from fairseq_ms.core.config import LayerConfig
from fairseq_ms.core.layers import FeedForward
from fairseq_ms.core.ops.linear import (
    ACTIVATIONS,
    NORMS,
    Norm,
    ShortConv,
    activation_linear,
    norm_linear,
)
from fairseq_ms.core.ops.recompute import draw_mask
from fairseq_ms.tools.saved_bytes import saved_bytes
from tests.core.ops import naive
from tests.helpers.gradients import assert_same_with_gradients, gradients


def random_norm(dim: int, kind: str = "layer") -> Norm:
    norm = NORMS[kind](dim, 1e-5).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activation_and_dropout_before_a_projection_equal_autograd(
    activation: str, p: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairseq_ms.core.ops.linear.draw_seed", lambda: 99)
    x = torch.randn(3, 5, 14, dtype=torch.float64, requires_grad=True)
    linear = nn.Linear(ACTIVATIONS[activation](x).size(-1), 4, bias).double()
    inputs = [x, *linear.parameters()]
    ours = activation_linear(x, activation, p, linear, recompute=True)
    hidden = ACTIVATIONS[activation](x)
    plain = F.linear(hidden * draw_mask(p, hidden, 99) if p else hidden, *linear.parameters())
    assert_same_with_gradients(ours, plain, inputs)


def random_conv(dim: int, taps: int) -> ShortConv | None:
    if not taps:
        return None
    conv = ShortConv(dim, taps).double()
    nn.init.normal_(conv.weight)
    return conv


@pytest.mark.parametrize("taps", [0, 1, 3, 8])
@pytest.mark.parametrize("kind", [*NORMS, None])
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_and_a_convolution_before_a_projection_equal_autograd(bias: bool, kind: str | None, taps: int) -> None:
    norm, conv = random_norm(7, kind) if kind else None, random_conv(7, taps)
    linear = nn.Linear(7, 4, bias).double()
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for module in (norm, conv, linear) if module is not None for p in module.parameters())]

    def expected(read_twice: bool) -> Tensor:
        normed = norm(x) if norm is not None else x
        normed = naive.short_conv(normed, conv.weight) if conv is not None else normed
        return torch.cat([linear(normed), normed.sin()], dim=-1) if read_twice else linear(normed)

    for recompute in (True, False):
        projected, normed = norm_linear(x, norm, linear, recompute, conv)
        assert_same_with_gradients(projected, expected(False), inputs)
        projected, normed = norm_linear(x, norm, linear, recompute, conv)
        assert_same_with_gradients(torch.cat([projected, normed.sin()], dim=-1), expected(True), inputs)
    # What the projection reads may be all that is used.
    own = inputs[: len(inputs) - len(list(linear.parameters()))]
    for recompute in (True, False):
        _, normed = norm_linear(x, norm, linear, recompute, conv)
        if normed is not x:
            assert_same_with_gradients(normed.sin(), expected(True)[..., 4:], own)


@pytest.mark.parametrize("taps", [0, 3])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_projection_keeps_what_the_norm_reads_alone(kind: str, taps: int, autocast: bool) -> None:
    norm, linear, conv = random_norm(7, kind), nn.Linear(7, 4).double(), random_conv(7, taps)
    modules = nn.ModuleList(module for module in (norm, linear, conv) if module is not None)
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    if autocast:
        modules, x = modules.float(), x.detach().float().requires_grad_()

    def forward() -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            return norm_linear(x, norm, linear, True, conv)[0]

    # And two numbers a position, by which the norm shifts and scales; autocast's copy of the weight.
    most = x.nbytes + 2 * 15 * x.itemsize + 2 * linear.weight.numel() * autocast
    assert saved_bytes(forward, modules) <= most


@pytest.mark.parametrize("taps", [1, 3, 8])
def test_a_convolution_in_pieces_knows_what_was_before(taps: int) -> None:
    conv, x = random_conv(7, taps), torch.randn(2, 17, 7, dtype=torch.float64)
    assert conv is not None
    before = LastInputs(x.new_zeros(2, taps, 7))
    with torch.no_grad():
        pieces = [conv(piece, before) for piece in x.split([1, 1, 5, 1, 9], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), naive.short_conv(x, conv.weight), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_under_autocast_is_normalised_again_in_the_type_that_it_was(dtype: torch.dtype, kind: str) -> None:
    block = FeedForward(LayerConfig(dim=24, ffn_dim=48, heads=1, norm=kind))
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
