import random

from tests.configs.transformer_xl import stack_flags

TASK = "streaming_language_modeling"
CONTEXT_WINDOW = 0


def random_flags(rng: random.Random) -> dict:
    factors = [1]
    while len(factors) < rng.choice([1, 2, 2, 3]):
        factors.append(factors[-1] * rng.choice([2, 2, 3]))
    return {
        **stack_flags(rng),
        "scale_layers": ",".join(f"{factor}x={rng.choice([1, 1, 2])}" for factor in factors),
        "output_layers": rng.choice([0, 1, 2]),
        "tokens_per_sample": factors[-1] * rng.choice([1, 2, 3]),
        "mem_len": rng.choice([0, 1, 3, 6, 11, 25]),
        "droppath": 0.3 if len(factors) > 1 else 0.0,
        "compression": rng.choice(["max", "avg"]) if len(factors) > 1 else "max",
    }
