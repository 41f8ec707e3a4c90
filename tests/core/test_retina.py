"""The retina's attention against dense attention with a mask, its caches against their definition, and a vanilla."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_ms import core
from fairseq_ms.core.cache import CannotTruncate
from fairseq_ms.core.retina import RetinaAttention, SlidingCache
from fairseq_ms.core.scales import window_turns
from tests.core.ops import naive
from tests.core.test_model import build
from tests.helpers.gradients import assert_same_with_gradients, gradients
from tests.helpers.seeds import seeds


def random_windows(rng: random.Random) -> list[core.Scale]:
    """Scales of one or two windows each, some of them open."""
    scales, factor, reached = [], 1, 0
    for _ in range(rng.choice([1, 2, 3])):
        near = max(factor if factor > 1 else 0, reached // factor * factor)
        for _ in range(rng.choice([1, 2])):
            far = near + factor * rng.randint(1, 20)
            scales.append(core.Scale(factor, near=near, far=rng.choice([None, far, far]), heads=rng.choice([1, 2])))
            reached = max(reached, scales[-1].far or 0)
        factor *= rng.choice([2, 3, 4])
        if reached < factor:
            break
    return window_turns(scales, sum(scale.heads for scale in scales), 1)[0]


def dense(layer: RetinaAttention, x: Tensor) -> Tensor:
    """What ``RetinaAttention`` computes, with T x C tables of scores."""
    dim, results, taken = x.size(-1), [], dict.fromkeys(layer.key_heads_of, 0)
    x = layer.norm(x) if layer.norm is not None else x
    fine = layer.fine(x)
    queries = fine[..., :dim].split([scale.heads * layer.head_dim for scale in layer.scales], dim=-1)
    for scale, q_BTD in zip(layer.scales, queries):
        pair, level = fine[..., dim:], list(layer.key_heads_of).index(scale.factor)
        if level:
            whole = x.size(1) - x.size(1) % scale.factor
            pair = layer.coarse[level - 1](layer.pools[level - 1](x[:, :whole]))
        own = slice(taken[scale.factor], taken[scale.factor] + scale.heads)
        taken[scale.factor] = own.stop
        k, v = pair.unflatten(-1, (2, -1, layer.head_dim)).permute(2, 0, 3, 1, 4)[:, :, own]
        q = q_BTD.unflatten(-1, (scale.heads, layer.head_dim)).transpose(1, 2)
        seen = naive.window_attention(q, k, v, scale.factor, scale.near, scale.far)
        results.append(seen.transpose(1, 2).flatten(2))
    return layer.out(torch.cat(results, dim=-1))


@pytest.mark.parametrize("seed", seeds(20, 60))
@pytest.mark.parametrize("recompute", [True, False])
def test_windows_equal_dense_attention_with_a_mask(seed: int, recompute: bool) -> None:
    rng = random.Random(seed)
    scales = random_windows(rng)
    heads = sum(scale.heads for scale in scales)
    sizes: dict[str, Any] = {"vocab_size": 5, "dim": 3 * heads, "ffn_dim": 4, "heads": heads, "recompute": recompute}
    pooling = rng.choice(["avg", "max", "conv"])
    config = core.RetinaConfig(**sizes, scales=tuple(scales), attention_dropout=0.0, downsampler=pooling)
    layer = RetinaAttention(config, scales).double()
    for parameter in layer.norm.parameters() if layer.norm is not None else ():
        torch.nn.init.normal_(parameter)
    length = rng.choice([1, 2, 7, 31, 64, 65, 150, 197])
    x = torch.randn(2, length, config.dim, dtype=torch.float64, requires_grad=True)
    expected = dense(layer, x)
    assert_same_with_gradients(layer(x), expected, [x, *layer.parameters()], 1e-10)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("parts", [{}, {"positions": "rotary", "head_dim": None, "qk_norm": True}])
def test_a_retina_of_one_open_window_is_a_vanilla(parts: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"dim": 48, "layers": 3, "dropout": 0.0, "attention_dropout": 0.0, **parts}
    vanilla, retina = build("Vanilla", **sizes), build("Retina", scales=(core.Scale(1),), **sizes)
    renamed = {"stack.": "", ".qkv.": ".fine."}
    weights = vanilla.state_dict()
    for old, new in renamed.items():
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    retina.load_state_dict(weights)
    tokens = torch.randint(11, (2, 64))
    found = []
    for model in (vanilla, retina):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        found.append([loss, *gradients(loss, list(model.parameters()))])
    # Bit for bit on a CPU, in training; a device has other kernels.
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    assert vanilla.generate(tokens[:, :20], 40, 0.0).equal(retina.generate(tokens[:, :20], 40, 0.0))
    caches: list[Any] = [list(model.new_state(2, 64).parts()) for model in (vanilla, retina)]
    assert [cache.buffer.shape for cache in caches[0]] == [cache.buffer.shape for cache in caches[1]]


@pytest.mark.cpu
def test_under_autocast_blocks_are_pooled_of_the_same_in_training_and_evaluation() -> None:
    scales = core.Scale(1, far=8), core.Scale(4, near=8, far=None)
    model, tokens = build("Retina", scales=scales, dropout=0.0, attention_dropout=0.0), torch.randint(11, (2, 33))
    with torch.autocast("cpu", torch.bfloat16):
        trained = model(tokens)[0]
        with torch.no_grad():
            assert trained.equal(model(tokens)[0])


def test_a_sliding_cache_gives_what_it_keeps_before_what_is_new() -> None:
    rng = random.Random(0)
    for keep in (1, 3, 8):
        cache = SlidingCache(2, 3, 4, keep, torch.empty(0))
        everything = torch.empty(2, 2, 3, 0, 4)
        for _ in range(40):
            new = torch.randn(2, 2, 3, rng.choice([0, 1, 1, 2, 20]), 4)
            start = max(0, everything.size(3) - keep)
            everything = torch.cat([everything, new], dim=3)
            assert cache.append(new).equal(everything[:, :, :, start:])
            kept, end = cache.kept()
            assert end == everything.size(3)
            assert kept.size(3) >= min(keep, end)
            assert kept.equal(everything[:, :, :, end - kept.size(3) :])
            order = torch.tensor([rng.randrange(2), rng.randrange(2)])
            cache.reorder(order)
            everything = everything[:, order]
        assert cache.buffer.size(3) == 2 * keep


@pytest.mark.parametrize("keep", [1, 3, 8])
def test_a_sliding_cache_goes_back_as_far_as_it_has_what_is_seen_from_there(keep: int) -> None:
    rng, everything, back = random.Random(0), torch.randn(2, 2, 3, 60, 4), 0
    for _ in range(40):
        cache, length = SlidingCache(2, 3, 4, keep, torch.empty(0)), rng.randint(1, 50)
        for new in everything[:, :, :, :length].split(rng.randint(1, 9), dim=3):
            cache.append(new)
        end = rng.randint(0, length)
        if end < cache.oldest_length():
            with pytest.raises(CannotTruncate, match=f"got {end}$"):
                cache.truncate(end)
            continue
        cache.truncate(end)
        back += end < length
        seen = cache.append(everything[:, :, :, end : end + 5])
        assert seen.equal(everything[:, :, :, max(0, end - keep) : end + 5])
    assert back
