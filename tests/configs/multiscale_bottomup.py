import random

from tests.configs import random_parts
from tests.configs.multiscale_topdown import random_factors, random_layers


def random_flags(rng: random.Random) -> dict:
    factors = random_factors(rng, 3)
    if len(factors) == 1:
        factors.append(rng.choice([2, 3, 5]))
    heads = {factor: rng.choice([1, 2]) for factor in factors[1:]}
    total = sum(heads.values())
    return {
        # Layer norm over two or three numbers is nearly a step, which blows rounding errors up: not fewer than 8.
        "decoder_embed_dim": 8 * total,
        "init_std": 0.9 / (8 * total) ** 0.5,
        "decoder_ffn_embed_dim": rng.choice([5, 12]),
        "decoder_attention_heads": total,
        "share_decoder_input_output_embed": rng.random() < 0.5,
        "scale_layers": random_layers(rng, factors),
        "scale_heads": ",".join(f"{factor}x={count}" for factor, count in heads.items()),
        "downsampler": rng.choice(["avg", "max", "conv"]),
        "recompute": rng.choice(["pointwise", "none"]),
        **random_parts(rng),
        "aggregation_gate": rng.random() < 0.5,
    }
