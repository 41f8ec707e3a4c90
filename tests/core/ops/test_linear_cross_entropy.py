"""The loss from features and output matrix equals that of logits, written out here."""

from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from fairseq_ms.core.ops import linear_cross_entropy as module
from fairseq_ms.core.ops.linear_cross_entropy import (
    linear_cross_entropy,
    most_probable,
)

PADDING = 1
# 7 rows at a time leave an unfinished piece of 2.
ROWS, AT_ONCE, DIM, SYMBOLS = 23, 7, 6, 31
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", AT_ONCE)


def drawn(dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Features, matrix, and targets of which a third are padding."""
    x = torch.randn(rows, DIM, dtype=dtype, requires_grad=True)
    weight = torch.randn(SYMBOLS, DIM, dtype=dtype, requires_grad=True)
    target = torch.randint(2, SYMBOLS, (rows,))
    target[::3] = PADDING
    return x, weight, target


def written_out(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, target, ignore_index=PADDING, reduction="none")


def in_pieces(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """``written_out`` over as many rows at a time: products of another size may round to another number."""
    return torch.cat([written_out(*rows) for rows in zip(x.split(AT_ONCE), repeat(weight), target.split(AT_ONCE))])


def assert_equal(found: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    """Values, and gradients of a weighted sum of them, relative to the largest of each."""
    assert found.dtype == expected.dtype
    weights = torch.linspace(0.5, 1.5, found.numel(), dtype=found.dtype).view_as(found)
    pairs = zip(
        (found, *torch.autograd.grad((found * weights).sum(), inputs)),
        (expected, *torch.autograd.grad((expected * weights).sum(), inputs)),
        strict=True,
    )
    for one, other in pairs:
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance * float(other.detach().abs().max()))


# Rounding of sums over 6, 23 and 31 numbers.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("several", [False, True])
def test_loss_and_gradients_are_those_of_the_logits(
    several: bool, reduce: bool, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight, targets = drawn(dtype)
    if several:
        targets = torch.stack([targets, targets.roll(1), targets.flip(0)], dim=1)
    expected = written_out(x.repeat_interleave(targets.numel() // ROWS, 0), weight, targets.flatten()).view_as(targets)
    found = linear_cross_entropy(x, weight, targets, PADDING, reduce)
    assert_equal(found, expected.sum() if reduce else expected, [x, weight], tolerance)


@pytest.mark.cpu
def test_nothing_as_large_as_the_logits_is_allocated() -> None:
    x, weight, target = drawn(torch.float32, rows=40 * AT_ONCE)
    with profile(profile_memory=True) as recorded:
        linear_cross_entropy(x, weight, target, PADDING).backward()
        most_probable(x, weight)
    largest = max(event.self_cpu_memory_usage for event in recorded.events())
    # Features and their gradients, or a piece's logits, whichever is more.
    assert AT_ONCE * SYMBOLS * 4 <= largest <= max(AT_ONCE * SYMBOLS, x.numel()) * 4 < x.size(0) * SYMBOLS * 4


@pytest.mark.parametrize("rows", [ROWS, 2000])
@pytest.mark.parametrize("scale", [1.0, 128.0, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_loss_and_gradients_are_those_of_double_precision(dtype: torch.dtype, scale: float, rows: int) -> None:
    x, weight, target = drawn(dtype, rows)
    with torch.no_grad():
        # Gradients then fit into float16 at the largest scale, where its p - 1 would not.
        x.mul_(0.3 / rows), weight.mul_(0.1)
    loss = linear_cross_entropy(x, weight, target, PADDING)
    x64, weight64 = wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = written_out(x64, weight64, target).sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0.0)
    found = torch.autograd.grad(loss * scale, [x, weight])
    for one, other in zip(found, torch.autograd.grad(expected * scale, wide), strict=True):
        # Rounded three times: the gradient by the logits, the product, and what comes of the scale. In single precision
        # sums over 2,000 rows are further off.
        atol = max(1.5 * torch.finfo(dtype).eps, 3e-6) * float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=atol)


@pytest.mark.parametrize("dtype", HALF)
def test_products_are_added_to_a_wider_sum_where_torch_can_and_converted_where_not(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions differ in which types ``addmm`` takes, and say so in different errors."""
    addmm, asked = torch.addmm, list[bool]()

    def of_a_gpu(total: Tensor, left: Tensor, right: Tensor, *, out: Tensor, out_dtype: Any = None) -> Tensor:
        asked.append(out_dtype is not None)
        return addmm(total, left.to(total.dtype), right.to(total.dtype), out=out)

    def of_an_older(total: Tensor, left: Tensor, right: Tensor, *, out: Tensor, out_dtype: Any = None) -> Tensor:
        if out_dtype is not None:
            raise RuntimeError("self and mat1 must have the same dtype")
        return of_a_gpu(total, left, right, out=out)

    def of_the_oldest(total: Tensor, left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        return of_a_gpu(total, left, right, out=out)

    x, weight, target = drawn(dtype)
    expected = torch.autograd.grad(linear_cross_entropy(x, weight, target, PADDING), weight)[0]
    for stub, wider in ((of_a_gpu, True), (of_an_older, False), (of_the_oldest, False)):
        module._adds_wider.cache_clear()
        monkeypatch.setattr(torch, "addmm", stub)
        asked.clear()
        assert torch.autograd.grad(linear_cross_entropy(x, weight, target, PADDING), weight)[0].equal(expected)
        assert set(asked) == {wider}
    module._adds_wider.cache_clear()


def test_products_are_computed_for_what_needs_a_gradient_alone() -> None:
    x, weight, target = drawn(torch.float32)

    def products(x: Tensor, weight: Tensor) -> float:
        with FlopCounterMode(display=False) as counted:
            loss = linear_cross_entropy(x, weight, target, PADDING)
        torch.testing.assert_close(loss, written_out(x, weight, target).sum())
        return counted.get_total_flops() / (2 * ROWS * SYMBOLS * DIM)

    assert products(x, weight) == 3
    # As for a model whose embedding is frozen, and for a matrix alone.
    assert products(x, weight.detach()) == products(x.detach(), weight) == 2
    with torch.no_grad():
        assert products(x, weight) == 1
        assert not linear_cross_entropy(x, weight, target, PADDING).requires_grad
    for needed, one, other in ((x, x, weight.detach()), (weight, x.detach(), weight)):
        found, expected = linear_cross_entropy(one, other, target, PADDING), written_out(one, other, target).sum()
        assert_equal(found, expected, [needed], 1e-6)


def test_a_second_backward_pass_and_a_second_derivative_are_refused() -> None:
    x, weight, target = drawn(torch.float32)
    loss = linear_cross_entropy(x, weight, target, PADDING)
    with pytest.raises(RuntimeError, match=r"^linear_cross_entropy has no second derivative: "):
        torch.autograd.grad(loss, x, create_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"^linear_cross_entropy goes backward once: compute the loss again$"):
        loss.backward()


def test_float16_sums_more_losses_than_it_can_count_to() -> None:
    x, weight, target = drawn(torch.float16, rows=20_000)
    loss = linear_cross_entropy(x * 4, weight, target, PADDING)
    assert torch.finfo(torch.float16).max < loss.item() < float("inf")


def test_float16_gradients_below_its_smallest_number_are_saved_by_the_scale_of_the_loss() -> None:
    scale = 2.0**14
    x, weight, target = drawn(torch.float16)
    with torch.no_grad():
        # A symbol that no row has for its target, 12.75 nats less probable than others: whatever their weights are, its
        # probability times 2**10 is a normal number of float16, and the gradient of 15 rows of small numbers is not.
        x.fill_(2.0**-6)
        weight[5] = -136.0
        target[target == 5] = 6
    gradient = torch.autograd.grad(linear_cross_entropy(x, weight, target, PADDING) * scale, weight)[0][5].double()
    x64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    expected = torch.autograd.grad(written_out(x64, weight64, target).sum(), weight64)[0][5]
    assert 0.0 < float(expected.abs().max()) < 2.0**-24
    # The gradient of logits is rounded to 2**-11, and the sum over rows once for every piece.
    torch.testing.assert_close(gradient / scale, expected, rtol=4 * 2.0**-11, atol=0.0)


def test_float16_gradients_of_an_improbable_target_survive_the_largest_scale_of_the_loss() -> None:
    x, weight = torch.full((1, DIM), 0.95), torch.full((SYMBOLS, DIM), 0.4)
    # p - 1 is -0.9998, which times 65,536 rounds to infinity.
    weight[5] = -0.49
    x, weight = inputs = [tensor.half().requires_grad_() for tensor in (x, weight)]
    target = torch.tensor([5])
    found = torch.autograd.grad(linear_cross_entropy(x, weight, target, PADDING) * 65536.0, inputs)
    x64, weight64 = wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(written_out(x64, weight64, target).sum() * 65536.0, wide)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3 * 2.0**-10, atol=0.0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_rounds_as_fairseqs_loss_does(dtype: torch.dtype, autocast: bool) -> None:
    x, weight, target = drawn(torch.float32 if autocast else dtype)
    with torch.autocast(x.device.type, dtype=dtype, enabled=autocast):
        found = linear_cross_entropy(x, weight, target, PADDING, reduce=False)
        expected, pieces = written_out(x, weight, target), in_pieces(x, weight, target)
    assert torch.equal(found, pieces)
    assert not autocast or not torch.equal(found, written_out(x, weight, target)), "or this test tests nothing"
    # The gradient of the matrix is rounded once for every piece, four times here: as many units in the last place.
    assert_equal(found, expected, [x, weight], 4 * torch.finfo(dtype).eps)


def test_the_most_probable_symbol_is_the_largest_logit() -> None:
    x, weight, _ = drawn(torch.float32)
    assert torch.equal(most_probable(x, weight), F.linear(x, weight).argmax(1))
