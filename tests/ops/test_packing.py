"""A packed weight gives what the weight gives, and stands aside where it cannot."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairseq_ms.core.ops.linear import Linear
from fairseq_ms.core.ops.output import TiedOutput
from fairseq_ms.core.ops.packing import PackedWeight, pieces_of

# What oneDNN packs on this machine; bfloat16 takes instructions that not every CPU has.
PACKS = {torch.float32: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(), torch.float64: False}


@pytest.mark.parametrize("dtype", [dtype for dtype, packs in PACKS.items() if packs])
@pytest.mark.parametrize("shape", [(1, 1, 24), (8, 1, 24), (3, 17, 24), (2, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_projection_is_the_projection(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    linear = Linear(24, 40, bias).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        plain = linear(x)
        linear.make_generation_fast_()
        assert linear.packed is not None
        assert linear.packed.serves(x, linear.weight)
        # 24 products in another order: rounding of float32, or one step of bfloat16's 8 bits.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(linear(x), plain, rtol=tolerance, atol=tolerance)


def test_a_packed_weight_is_left_alone_by_gradients_and_not_used_for_another_type() -> None:
    linear = Linear(6, 4)
    linear.make_generation_fast_()
    x = torch.randn(3, 6, requires_grad=True)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(3, 6))
    assert "packed" not in "".join(linear.state_dict())
    assert linear.packed is not None
    with torch.no_grad():
        assert not linear.packed.serves(x.double(), linear.weight)
        assert not linear.packed.serves(x, nn.Parameter(linear.weight.clone()))


@pytest.mark.parametrize("change", ["in place", "replaced", "moved", "loaded"])
def test_a_changed_weight_is_never_answered_with_the_packed_old_one(change: str) -> None:
    linear = Linear(6, 4)
    linear.make_generation_fast_()
    x = torch.randn(3, 6)
    with torch.no_grad():
        if change == "in place":
            linear.weight.mul_(2.0)
        elif change == "replaced":
            linear.weight = nn.Parameter(torch.randn(4, 6))
        elif change == "moved":
            linear.double().float().weight.add_(1.0)
        else:
            linear.load_state_dict(Linear(6, 4).state_dict())
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize("dtype", [dtype for dtype, packs in PACKS.items() if not packs])
def test_packing_on_a_type_without_support_falls_back(dtype: torch.dtype) -> None:
    assert_is_left_as_it_is(Linear(6, 4).to(dtype))


def assert_is_left_as_it_is(linear: Linear) -> None:
    """fairseq's hook packs nothing, and the projection is torch's own."""
    linear.make_generation_fast_()
    assert linear.packed is None
    x = torch.randn(3, 6, dtype=linear.weight.dtype)
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_a_cpu_without_bfloat16_instructions_packs_float32_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert PackedWeight.supports(torch.empty(4, 6))
    assert_is_left_as_it_is(Linear(6, 4).bfloat16())


def test_a_torch_without_the_operators_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert_is_left_as_it_is(Linear(6, 4))


def test_the_tied_output_follows_its_embedding() -> None:
    words = nn.Embedding(11, 6)
    output = TiedOutput(words)
    assert not list(output.parameters())
    output.make_generation_fast_()
    x = torch.randn(2, 3, 6)
    with torch.no_grad():
        # 6 products in another order.
        torch.testing.assert_close(output(x), x @ words.weight.t(), rtol=0.0, atol=1e-6)
        words.weight.mul_(3.0)
        torch.testing.assert_close(output(x), x @ words.weight.t(), rtol=0.0, atol=1e-6)


def test_every_number_of_rows_is_made_of_few() -> None:
    pieces = {rows: pieces_of(rows) for rows in range(5000)}
    assert all(sum(found) == rows for rows, found in pieces.items())
    assert len(set(itertools.chain(*pieces.values()))) == 17 + 8
    assert pieces[437] == [256, 128, 32, 16, 5]


def resident() -> float:
    """This process' memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_inputs_of_new_lengths_do_not_cost_memory() -> None:
    linear = Linear(16, 24)
    linear.make_generation_fast_()
    with torch.no_grad():
        assert linear(torch.ones(2, 0, 16)).shape == (2, 0, 24)
        linear(torch.ones(1, 512, 16))
        before = resident()
        for rows in range(1, 500):
            x = torch.randn(1, rows, 16)
            torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias), rtol=1e-5, atol=1e-5)
    # oneDNN's kernels for 500 numbers of rows take more than 200 MB where it has AVX-512.
    assert resident() - before < 25
