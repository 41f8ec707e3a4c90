import math
import random

from tests.configs import pooled_parts, shared_keys, wide_flags

CRITERION = "bag_of_words"
# The words of a bag score the same in any order, so beams tie.
BEAM = 1


def random_flags(rng: random.Random) -> dict:
    heads = rng.choice([1, 2, 3])
    return {
        **wide_flags(rng, heads),
        "scale_layers": f"{rng.choice([1, 2, 3, 4, 8])}x={rng.choice([1, 2])}",
        **pooled_parts(rng),
        **shared_keys(rng, heads),
    }


def first_output_that_sees(flags: dict, position: int) -> float:
    """The first output that a token at ``position`` must change: that of the block it is pooled into."""
    if flags["downsampler"] == "max":
        return math.inf
    factor = int(flags["scale_layers"].split("x")[0])
    return math.ceil(position / factor) * factor
