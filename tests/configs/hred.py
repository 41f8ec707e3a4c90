import random

from tests.configs import haed

TOLERANCE = haed.TOLERANCE
DATA_DECIDES_SHAPES = haed.DATA_DECIDES_SHAPES
LEARNED_POSITIONS = haed.LEARNED_POSITIONS


def random_flags(rng: random.Random) -> dict:
    return haed.random_flags(rng, main="lstm")
