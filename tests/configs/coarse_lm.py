import math
import random

from tests.configs import random_parts

CRITERION = "bag_of_words"
# The words of a bag score the same in any order, so beams tie.
BEAM = 1


def random_flags(rng: random.Random) -> dict:
    heads = rng.choice([1, 2, 3])
    return {
        # Layer norm over two or three numbers is nearly a step, which blows rounding errors up: not fewer than 8.
        "decoder_embed_dim": 8 * heads,
        "init_std": 0.9 / (8 * heads) ** 0.5,
        "decoder_ffn_embed_dim": rng.choice([5, 12]),
        "decoder_attention_heads": heads,
        "share_decoder_input_output_embed": rng.random() < 0.5,
        "scale_layers": f"{rng.choice([1, 2, 3, 4, 8])}x={rng.choice([1, 2])}",
        "downsampler": rng.choice(["avg", "max", "conv"]),
        "recompute": rng.choice(["pointwise", "none"]),
        **random_parts(rng),
    }


def first_output_that_sees(flags: dict, position: int) -> float:
    """The first output that a token at ``position`` must change: that of the block it is pooled into."""
    if flags["downsampler"] == "max":
        return math.inf
    factor = int(flags["scale_layers"].split("x")[0])
    return math.ceil(position / factor) * factor
