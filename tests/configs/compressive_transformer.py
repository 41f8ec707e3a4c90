import random

from tests.configs.transformer_xl import stack_flags

TASK = "streaming_language_modeling"
CONTEXT_WINDOW = 0


def random_flags(rng: random.Random) -> dict:
    rate = rng.choice([2, 3])
    return {
        **stack_flags(rng),
        "decoder_layers": rng.choice([1, 2, 3]),
        "tokens_per_sample": rate * rng.choice([1, 2, 3]),
        "mem_len": rng.choice([0, 1, 3, 7]),
        "compressed_mem_len": rng.choice([0, 1, 2, 5]),
        "compression_rate": rate,
    }
