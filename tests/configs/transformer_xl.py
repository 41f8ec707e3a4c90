import random

from tests.configs import layer_parts

TASK = "streaming_language_modeling"
CONTEXT_WINDOW = 0


def stack_flags(rng: random.Random) -> dict:
    heads = rng.choice([1, 2, 3])
    return {
        # A layer norm of two numbers is their order alone, and turns a rounding error into another output.
        "decoder_embed_dim": max(4, heads * rng.choice([2, 4])),
        "decoder_ffn_embed_dim": rng.choice([5, 12]),
        "decoder_attention_heads": heads,
        # As wide as the heads are many, or not.
        "attention_head_dim": rng.choice([None, 3]),
        "decoder_normalize_before": rng.random() < 0.5,
        "share_decoder_input_output_embed": rng.random() < 0.5,
        "recompute": rng.choice(["pointwise", "none"]),
        **layer_parts(rng),
    }


def random_flags(rng: random.Random) -> dict:
    return {
        **stack_flags(rng),
        "decoder_layers": rng.choice([1, 2, 3]),
        "tokens_per_sample": rng.choice([1, 2, 3, 5, 8]),
        "mem_len": rng.choice([0, 1, 2, 4, 7, 11]),
    }
