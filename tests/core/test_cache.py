"""The cache of keys and values against a list of what was put in."""

import random

import pytest
import torch

from fairseq_ms.core.cache import KeyValueCache


@pytest.mark.parametrize("seed", range(10))
def test_a_cache_is_what_was_appended_reordered_and_truncated(seed: int) -> None:
    rng = random.Random(seed)
    cache = KeyValueCache(2, 3, 4, rng.choice([0, 1, 5]), torch.empty(0))
    expected = torch.empty(2, 2, 3, 0, 4)
    for _ in range(60):
        action = rng.choice(["append", "append", "reorder", "truncate"])
        if action == "append":
            new = torch.randn(2, expected.size(1), 3, rng.choice([1, 1, 2, 7]), 4)
            expected = torch.cat([expected, new], dim=3)
            assert torch.equal(cache.append(new), expected)
        elif action == "reorder":
            rows = expected.size(1)
            order = torch.tensor([rng.randrange(rows) for _ in range(rng.randint(1, 4))])
            expected = expected[:, order]
            cache.reorder(order)
        else:
            length = rng.randint(0, expected.size(3))
            expected = expected[:, :, :, :length]
            cache.truncate(length)
        assert cache.length == expected.size(3)
        assert torch.equal(cache.kept()[0], expected)


def test_growing_doubles_so_that_n_steps_copy_a_few_n_positions() -> None:
    cache = KeyValueCache(1, 1, 2, 1, torch.empty(0))
    sizes = set()
    for _ in range(1000):
        cache.append(torch.zeros(2, 1, 1, 1, 2))
        sizes.add(cache.buffer.size(3))
    assert len(sizes) == 11
