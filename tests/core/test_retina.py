"""Attention through windows against dense attention with a mask, and its caches against their definition."""

import itertools
import random

import pytest
import torch

from fairseq_ms.core.layers import LayerConfig
from fairseq_ms.core.ops import naive, window_attention
from fairseq_ms.core.ops.attention import _QUERY_CHUNK
from fairseq_ms.core.ops.recompute import DropoutMasks, keep_prob
from fairseq_ms.core.ops.window_attention import HeadGroup, Layouts
from fairseq_ms.core.retina import RetinaAttention, SlidingCache
from tests.helpers.gradients import assert_same_with_gradients
from tests.registry import seeds

PAPER = [HeadGroup(1, 0, 8, 1), HeadGroup(4, 8, 256, 1), HeadGroup(16, 256, 512, 1)]


def random_groups(rng: random.Random) -> list[HeadGroup]:
    groups, factor, reached = [], 1, 0
    for _ in range(rng.choice([1, 2, 3])):
        near = max(0, reached - rng.choice([0, 0, 2]))
        far = max(reached, near + factor) + rng.randint(1, 3 * factor + 8)
        groups.append(HeadGroup(factor, near, far, rng.choice([1, 2])))
        reached, factor = far, factor * rng.choice([2, 3, 4])
    return groups


def attention(
    dim: int, groups: list[HeadGroup], downsampler: str = "avg", dropout: float = 0.0, recompute: bool = True
) -> RetinaAttention:
    """In double precision."""
    heads = sum(group.heads for group in groups)
    config = LayerConfig(dim=dim, ffn_dim=4, heads=heads, attention_dropout=dropout, recompute=recompute)
    layer = RetinaAttention(config, groups, downsampler).double()
    assert isinstance(layer.norm, torch.nn.LayerNorm)
    torch.nn.init.normal_(layer.norm.weight)
    torch.nn.init.normal_(layer.norm.bias)
    return layer


def dense(layer: RetinaAttention, x: torch.Tensor, masks=None) -> torch.Tensor:
    """What ``RetinaAttention`` computes, with T x C tables of scores; ``masks`` (B, N, T, C) a group for dropout."""
    dim = x.size(-1)
    x = layer.norm(x)
    fine = layer.fine(x)
    queries = fine[..., :dim].split([group.heads * layer.head_dim for group in layer.groups], dim=-1)
    results = []
    for level, group in enumerate(layer.groups):
        if level == 0:
            pair = fine[..., dim:]
        else:
            whole = x.size(1) - x.size(1) % group.factor
            pair = layer.coarse[level - 1](layer.pools[level - 1](x[:, :whole]))
        k, v = pair.unflatten(-1, (2, group.heads, layer.head_dim)).permute(2, 0, 3, 1, 4)
        q = queries[level].unflatten(-1, (group.heads, layer.head_dim)).transpose(1, 2)
        window = group.factor, group.near, group.far
        mask = None if masks is None else masks[level].clone()
        seen = naive.window_attention(q, k, v, *window, mask, keep_prob(layer.dropout) if mask is not None else 1.0)
        results.append(seen.transpose(1, 2).flatten(2))
    return layer.out(torch.cat(results, dim=-1))


@pytest.mark.parametrize("seed", seeds(15, 40))
@pytest.mark.parametrize("recompute", [True, False])
def test_windows_equal_dense_attention_with_a_mask(seed: int, recompute: bool, monkeypatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(window_attention, "_PIECE", rng.choice([1, 64, 128, 512]))
    groups = random_groups(rng)
    dim = 3 * sum(group.heads for group in groups)
    layer = attention(dim, groups, rng.choice(["avg", "max", "conv"]), recompute=recompute)
    x = torch.randn(2, rng.choice([1, 2, 7, 31, 64, 65, 150, 197]), dim, dtype=torch.float64, requires_grad=True)
    result = layer(x, Layouts(groups, x.size(1), x.device))
    assert_same_with_gradients(result, dense(layer, x), [x, *layer.parameters()], 1e-10)


@pytest.mark.parametrize("length", [512, 700])
def test_the_papers_windows_equal_dense_attention_with_a_mask(length: int) -> None:
    layer = attention(6, PAPER)
    x = torch.randn(1, length, 6, dtype=torch.float64, requires_grad=True)
    result = layer(x, Layouts(PAPER, length, x.device))
    assert_same_with_gradients(result, dense(layer, x), [x, *layer.parameters()], 1e-10)


def test_without_gradients_the_result_is_the_same() -> None:
    layer = attention(6, PAPER)
    x = torch.randn(2, 330, 6, dtype=torch.float64)
    layouts = Layouts(PAPER, 330, x.device)
    with torch.no_grad():
        # float64, the same products in the same order.
        torch.testing.assert_close(layer(x, layouts), dense(layer, x), rtol=0.0, atol=1e-12)


@pytest.mark.cpu
@pytest.mark.parametrize("seed", range(6))
def test_dropout_equals_dense_attention_with_the_same_mask(seed: int, monkeypatch) -> None:
    rng = random.Random(seed)
    at_once = rng.choice([64, 128, 512])
    monkeypatch.setattr(window_attention, "_PIECE", at_once)
    groups = random_groups(rng)
    dim = 3 * sum(group.heads for group in groups)
    length = rng.choice([40, 131, 200])
    layer = attention(dim, groups, dropout=0.3)
    layouts = Layouts(groups, length, torch.get_default_device())
    masks = [torch.ones(2, group.heads, length, length // group.factor) for group in groups]
    keep = DropoutMasks.keep
    drawn: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}

    def spy(self: DropoutMasks, weights: torch.Tensor, index: int, place: tuple[int, ...]) -> torch.Tensor:
        mask = keep(self, weights, index, place)
        # In backward, the mask of the same piece and chunk once more.
        assert torch.equal(drawn.setdefault((place, index), mask.clone()), mask)
        return mask

    monkeypatch.setattr(DropoutMasks, "keep", spy)
    x = torch.randn(2, length, dim, dtype=torch.float64, requires_grad=True)
    result = layer(x, layouts)
    in_order = iter(list(drawn.values()))
    for group, layout, table in zip(groups, layouts.layouts, masks):
        for row in range(2):
            step = max(1, at_once // layout.query_block)
            pieces = range(0, layout.blocks, step)
            for first, start in itertools.product(pieces, range(0, layout.query_block, _QUERY_CHUNK)):
                # (blocks * N, rows, S) -> (blocks, N, rows, S)
                mask = next(in_order).unflatten(0, (min(step, layout.blocks - first), group.heads))
                for block, i, j in itertools.product(*(range(size) for size in (*mask.shape[:1], *mask.shape[2:]))):
                    t = (first + block) * layout.query_block + start + i
                    s = (first + block) * layout.step - layout.pad_left + j
                    if t < length and 0 <= s < layout.keys:
                        table[row, :, t, s] = mask[block, :, i, j]
    assert next(in_order, None) is None
    assert all((table == 0.0).any() for table in masks)
    assert_same_with_gradients(result, dense(layer, x, masks), [x, *layer.parameters()], 1e-10)


def test_a_sliding_cache_holds_the_last_positions() -> None:
    rng = random.Random(0)
    for keep in (1, 3, 8):
        cache = SlidingCache(2, 3, 4, keep, torch.empty(0))
        everything = torch.empty(2, 2, 3, 0, 4)
        for _ in range(40):
            new = torch.randn(2, 2, 3, rng.choice([0, 1, 1, 2, 20]), 4)
            everything = torch.cat([everything, new], dim=3)
            cache.append(*new)
            end = everything.size(3)
            start = max(0, end - keep)
            k, v = cache.view(start, end)
            assert torch.equal(torch.stack([k, v]), everything[:, :, :, start:])
            order = torch.tensor([rng.randrange(2), rng.randrange(2)])
            cache.reorder(order)
            everything = everything[:, order]
