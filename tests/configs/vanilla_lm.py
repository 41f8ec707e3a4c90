import random

from tests.configs import random_parts, shared_keys


def random_flags(rng: random.Random) -> dict:
    heads, far = rng.choice([1, 2, 3]), rng.randint(1, 9)
    windows: list[tuple[str | None, tuple[int, ...]]] = [*2 * [(None, (heads,))], (f"1x=0:{far}", (heads,))]
    if heads > 1:
        windows += [(f"1x=0:{far}*1,1x=0:*{heads - 1}", (1, heads - 1))]
    window, counts = rng.choice(windows)
    return {
        "decoder_embed_dim": heads * rng.choice([2, 4]),
        "decoder_ffn_embed_dim": rng.choice([5, 12]),
        "decoder_attention_heads": heads,
        "decoder_layers": rng.choice([1, 2, 3]),
        "share_decoder_input_output_embed": rng.random() < 0.5,
        "scale_windows": window,
        **random_parts(rng),
        "attention_head_dim": rng.choice([None, None, 6]),
        **shared_keys(rng, *counts),
    }
