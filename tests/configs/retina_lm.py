import random

from tests.configs import random_parts, shared_keys


def random_windows(rng: random.Random, factors: list[int], overlap: bool, several: bool) -> list[tuple[str, int]]:
    """The windows of one layer with their heads: of every scale one, or up to two, of which some are open."""
    windows, reached = [], 0
    for factor, coarser in zip(factors, [*factors[1:], 1]):
        near = (reached - rng.choice([0, factor]) * overlap) // factor * factor
        near = max(near, factor if factor > 1 else 0)
        # The next window begins where this one ends.
        far = -(-(max(reached, near) + factor * rng.randint(1, 4)) // coarser) * coarser
        for _ in range(rng.choice([1, 2]) if several else 1):
            end = rng.choice(["", far, far]) if several else far
            windows.append((f"{factor}x={near}:{end}", rng.choice([1, 2])))
        windows[-1] = f"{factor}x={near}:{far}", windows[-1][1]
        reached = far
    rng.shuffle(windows)
    return windows


def random_flags(rng: random.Random) -> dict:
    factors = [1]
    while len(factors) < rng.choice([1, 2, 3, 3]):
        factors.append(factors[-1] * rng.choice([2, 3]))
    overlap, several, layers = rng.random() < 0.3, rng.random() < 0.5, rng.choice([1, 2, 3])
    turns = [random_windows(rng, factors, overlap, several)]
    heads = sum(count for _, count in turns[0])
    if several and layers > 1 and rng.random() < 0.5:
        turns.append([("1x=0:", heads)])
    flags = (
        {"scale_heads": None}
        if several
        else {"scale_heads": ",".join(f"{window.split('=')[0]}={count}" for window, count in turns[0])}
    )
    return {
        "decoder_embed_dim": heads * rng.choice([2, 4]),
        "decoder_ffn_embed_dim": rng.choice([5, 12]),
        "decoder_attention_heads": heads,
        "decoder_layers": layers,
        "share_decoder_input_output_embed": rng.random() < 0.5,
        "scale_windows": "|".join(
            ",".join(f"{window}*{count}" if several else window for window, count in turn) for turn in turns
        ),
        **flags,
        "window_overlap": "allow" if overlap else "forbid",
        "downsampler": rng.choice(["avg", "max", "conv"]),
        **random_parts(rng),
        "attention_head_dim": rng.choice([None, None, 6]),
        **shared_keys(rng, *(count for _, count in turns[0])),
    }
