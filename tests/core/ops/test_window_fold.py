"""Windows as sliding windows of flash attention against dense masks, and the call that a GPU gets."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.growth import WINDOWS
from fairseq_ms.core.ops.window_attention import HeadGroup
from fairseq_ms.core.ops.window_fold import folded_window_attention, folds, sliding_window
from fairseq_ms.lm.registry import PRESETS
from fairseq_ms.lm.scales import parse_windows
from tests.helpers.gradients import assert_same_with_gradients

HEAD_DIM = 8
OF_PRESETS = {str(values["scale_windows"]) for p in PRESETS.values() if "scale_windows" in (values := p.values)}


def groups_of(windows: str) -> list[HeadGroup]:
    spans = parse_windows("--scale-windows", windows, overlap=True)
    return [HeadGroup(factor, near, far, 1 + index % 2) for index, (factor, (near, far)) in enumerate(spans.items())]


def projections(groups: list[HeadGroup], length: int, **kinds: object) -> list[Tensor]:
    """Queries of all groups beside the fine pair, and the coarse pairs, of two rows."""
    torch.manual_seed(length)
    fine = HEAD_DIM * (sum(group.heads for group in groups) + 2 * groups[0].heads)
    shapes = [(2, length, fine), *((2, length // g.factor, 2 * HEAD_DIM * g.heads) for g in groups[1:])]
    return [torch.randn(shape, requires_grad=True, **kinds) for shape in shapes]  # type: ignore[call-overload]


def dense(groups: list[HeadGroup], fine: Tensor, *coarse: Tensor) -> Tensor:
    """The definition, with tables of T x C scores."""
    length, results = fine.size(1), []
    widths = [HEAD_DIM * group.heads for group in groups]
    *queries, pair = fine.split([*widths, 2 * widths[0]], dim=-1)
    for group, q, both in zip(groups, queries, [pair, *coarse], strict=True):
        q = q.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        k, v = both.unflatten(-1, (2, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        start = group.factor * torch.arange(length // group.factor)
        distance = torch.arange(length)[:, None] - start
        seen = (distance >= group.factor - 1) & (distance >= group.near) & (distance < group.far)
        weights = (q @ k.transpose(-1, -2) / HEAD_DIM**0.5).exp() * seen
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        results.append((weights @ v).transpose(1, 2).flatten(2))
    return torch.cat(results, dim=-1)


@pytest.mark.parametrize("length", [1, 3, 15, 16, 70, 259, 701])
@pytest.mark.parametrize("windows", [*sorted(OF_PRESETS), WINDOWS, "1x=0:3,2x=2:6,6x=6:18"])
def test_folded_windows_equal_dense_masks(windows: str, length: int) -> None:
    groups = groups_of(windows)
    assert all(map(folds, groups))
    inputs = projections(groups, length, dtype=torch.float64)
    found = folded_window_attention(inputs[0], inputs[1:], groups, HEAD_DIM)
    # float64: sums in another order.
    assert_same_with_gradients(found, dense(groups, *inputs), inputs)


@pytest.mark.parametrize(("near", "far"), [(4, 10), (6, 12), (0, 8)])
def test_windows_that_are_not_whole_finished_blocks_do_not_fold(near: int, far: int) -> None:
    assert not folds(HeadGroup(4, near, far, 1))


def test_the_call_of_flash_attention_is_one_that_torch_has_with_its_gradients() -> None:
    with torch.device("meta"):
        q, k = (torch.randn(2, 30, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2))
        y = sliding_window(q, k, k, 7)
        assert y.shape == q.shape
        assert y.grad_fn is not None
        assert "FlashAttention" in y.grad_fn.name()
        grads = torch.autograd.grad(y, [q, k], torch.ones_like(y))
    assert [grad.shape for grad in grads] == [q.shape, k.shape]


def test_a_window_has_its_query_and_so_many_positions_before_it() -> None:
    q, k = torch.randn(1, 20, 4, 8, dtype=torch.float64), torch.randn(1, 20, 2, 8, dtype=torch.float64)
    found = sliding_window(q, k, k, 3)
    for i in range(20):
        own = k[:, max(0, i - 3) : i + 1].repeat_interleave(2, dim=2).transpose(1, 2)
        expected = F.scaled_dot_product_attention(q[:, i : i + 1].transpose(1, 2), own, own)
        torch.testing.assert_close(found[:, i : i + 1].transpose(1, 2), expected, rtol=0.0, atol=1e-12)
