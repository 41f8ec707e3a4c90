import random

from tests.configs import pooled_parts, shared_keys, wide_flags


def random_factors(rng: random.Random, coarse: int) -> list[int]:
    """1 and up to ``coarse`` coarser scales, each a multiple of the one before."""
    factors = [1]
    for _ in range(rng.randint(0, coarse)):
        factors.append(factors[-1] * rng.choice([2, 3, 4]))
    return factors


def random_layers(rng: random.Random, factors: list[int]) -> str:
    items = [f"{factor}x={rng.choice([1, 1, 2])}" for factor in factors]
    rng.shuffle(items)
    return ",".join(items)


def random_flags(rng: random.Random) -> dict:
    heads = rng.choice([1, 2, 3])
    return {
        **wide_flags(rng, heads),
        "scale_layers": random_layers(rng, random_factors(rng, 3)),
        **pooled_parts(rng),
        **shared_keys(rng, heads),
    }
