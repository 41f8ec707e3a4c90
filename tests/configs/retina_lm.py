import random

from tests.configs import random_parts


def random_flags(rng: random.Random) -> dict:
    factors = [1]
    while len(factors) < rng.choice([1, 2, 3, 3]):
        factors.append(factors[-1] * rng.choice([2, 3]))
    overlap = rng.random() < 0.3
    windows, reached = [], 0
    for factor, coarser in zip(factors, [*factors[1:], 1]):
        near = max(factor - 1, reached - rng.randint(0, 2)) if overlap else reached
        # The next window may not begin before its blocks are finished.
        far = max(max(reached, near + factor) + rng.randint(1, 8), coarser - 1)
        windows.append(f"{factor}x={near}:{far}")
        reached = far
    rng.shuffle(windows)
    heads = {factor: rng.choice([1, 2]) for factor in factors}
    return {
        "decoder_embed_dim": sum(heads.values()) * rng.choice([2, 4]),
        "decoder_ffn_embed_dim": rng.choice([5, 12]),
        "decoder_attention_heads": sum(heads.values()),
        "decoder_layers": rng.choice([1, 2, 3]),
        "share_decoder_input_output_embed": rng.random() < 0.5,
        "scale_windows": ",".join(windows),
        "scale_heads": ",".join(f"{factor}x={count}" for factor, count in heads.items()),
        "window_overlap": "allow" if overlap else "forbid",
        "downsampler": rng.choice(["avg", "max", "conv"]),
        **random_parts(rng),
    }
