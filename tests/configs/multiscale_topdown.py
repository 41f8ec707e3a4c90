import random

from tests.configs import random_parts


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
        # Layer norm over two or three numbers is nearly a step, which blows rounding errors up: not fewer than 8.
        "decoder_embed_dim": 8 * heads,
        "init_std": 0.9 / (8 * heads) ** 0.5,
        "decoder_ffn_embed_dim": rng.choice([5, 12]),
        "decoder_attention_heads": heads,
        "share_decoder_input_output_embed": rng.random() < 0.5,
        "scale_layers": random_layers(rng, random_factors(rng, 3)),
        "downsampler": rng.choice(["avg", "max", "conv"]),
        "recompute": rng.choice(["pointwise", "none"]),
        **random_parts(rng),
    }
