import random

from tests.configs import haed

TOLERANCE = haed.TOLERANCE


def random_flags(rng: random.Random) -> dict:
    return haed.random_flags(rng, main="lstm")
