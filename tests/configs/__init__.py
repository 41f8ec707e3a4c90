"""Small random configurations, one module an architecture: ``random_flags(rng)`` gives flags for ``build``.

A module may also define

- ``TOLERANCE``: what "unchanged" means where the data decides the shapes (default 0.0, bit-identical)
- ``LENGTHS``: (shortest, longest) random sequence of the fuzzed tests (default (1, 24))
- ``GENERATES``: False for a model that predicts something other than the next token (default True)
- ``TASK``: the fairseq task it is trained with (default "language_modeling")
- ``CONTEXT_WINDOW``: the context window of the evaluation tests, 0 for a task that refuses one (default 9 or 12)
- ``CRITERION``: fairseq's criterion name (default "cross_entropy")
- ``HAS_LONGEST_TEXT``: False where ``has_position_embedding`` is (default True)
- ``BEAM``: the beam of the generation tests, 1 where scores tie (default: several)
- ``LEARNED_POSITIONS``: what must join these flags for a model that learns positions (default nothing)
- ``DATA_DECIDES_SHAPES``: True where the tokens decide the shapes, which no trace can follow (default False)
- ``first_output_that_sees(flags, position)``: the first output that a token there must change (default that position)
"""

from __future__ import annotations

import random


def layer_parts(rng: random.Random) -> dict:
    """What layers of any model may be made of."""
    return {
        "norm": rng.choice(["layer", "rms"]),
        "no_bias": rng.random() < 0.3,
        "init_residual": rng.choice(["normal", "normal", "scaled"]),
        "activation_fn": rng.choice(["gelu", "relu", "relu_squared", "swish", "swiglu"]),
    }


def random_parts(rng: random.Random) -> dict:
    """What layers without a memory may be made of, positions among it."""
    parts, positions = layer_parts(rng), rng.choice(["learned", "rotary", "none"])
    after, attention = rng.random() < 0.3, random.Random(rng.random())
    return {
        **parts,
        "positions": positions,
        "decoder_normalize_after": after,
        "qk_norm": attention.choice(["False", "False", "True", "scaled"]),
        "sinks": attention.random() < 0.3,
        "short_conv": attention.choice([0, 0, 1, 3]),
        "scale_embedding": rng.random() < 0.3,
    }


def shared_keys(rng: random.Random, *heads: int) -> dict:
    """Heads of keys, for whole groups of the heads of every window."""
    groups = [group for group in (1, 2, 3) if not any(count % group for count in heads)]
    return {"kv_heads": rng.choice([None, sum(heads) // rng.choice(groups)])}


def wide_flags(rng: random.Random, heads: int) -> dict:
    """Sizes of stacks of layers; layer norm over two or three numbers is nearly a step, which blows rounding up."""
    return {
        "decoder_embed_dim": 8 * heads,
        "init_std": 0.9 / (8 * heads) ** 0.5,
        "decoder_ffn_embed_dim": rng.choice([5, 12]),
        "decoder_attention_heads": heads,
        "share_decoder_input_output_embed": rng.random() < 0.5,
    }


def pooled_parts(rng: random.Random) -> dict:
    """How scales are pooled, and what their layers are made of."""
    return {
        "downsampler": rng.choice(["avg", "max", "conv"]),
        "recompute": rng.choice(["pointwise", "none"]),
        **random_parts(rng),
    }
