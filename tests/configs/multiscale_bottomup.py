import random

from tests.configs import pooled_parts, shared_keys, wide_flags
from tests.configs.multiscale_topdown import random_factors, random_layers


def random_flags(rng: random.Random) -> dict:
    factors = random_factors(rng, 3)
    if len(factors) == 1:
        factors.append(rng.choice([2, 3, 5]))
    heads = {factor: rng.choice([1, 2]) for factor in factors[1:]}
    total = sum(heads.values())
    return {
        **wide_flags(rng, total),
        "scale_layers": random_layers(rng, factors),
        "scale_heads": ",".join(f"{factor}x={count}" for factor, count in heads.items()),
        **pooled_parts(rng),
        **shared_keys(rng, total),
        "aggregation_gate": rng.random() < 0.5,
    }
