"""The campaign: hundreds of faults, drawn at random, and the table of those that were survived.

make faults                                 all of them
python -m tests.faults.campaign --share 0.1 --seed 7 --only checkpoint
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from tests.faults import trials
from tests.faults.damages import DAMAGES
from tests.faults.injections import DISK, MOMENTS
from tests.faults.trials import ARCHITECTURES, ERRORS, Bench, Trial

# How many strikes a run is given before it may go on to its end.
STRIKES = 5
DATA = ("dict.txt", "train.idx", "train.bin")


def signals(rng: random.Random, share: float, strikes: int) -> Iterator[Trial]:
    """Runs of one process and of two, struck at random moments."""
    for signum, what in ((signal.SIGKILL, "kill -9"), (signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1")):
        for ranks, struck in ((1, (0,)), (2, (0, 1)), (2, (0,)), (2, (1,))):
            # Only the first rank writes, and one that waits for the other to begin waits for torch's half an hour.
            idle = ("any time" if len(struck) < ranks else "", "saving" if struck == (1,) else "")
            moments = [moment for moment in MOMENTS if moment not in idle]
            who = "one process" if ranks == 1 else "both of two" if len(struck) == 2 else "one of two"
            for arch in ARCHITECTURES:
                for _ in range(max(1, round(share * (4 if ranks == 1 else 2)))):
                    drawn = [(moment, count(moment, rng)) for moment in rng.choices(moments, k=strikes)]
                    attempt = functools.partial(trials.signalled, arch, ranks, signum, struck, drawn)
                    yield Trial(f"{what}, {who}", f"{arch} at {drawn}", attempt)


def count(moment: str, rng: random.Random) -> int:
    """Which one of its kind: a run has 18 updates or more, and takes about two seconds."""
    most = {"forward": 150, "update": 8, "saving": 60, "validation": 4, "between epochs": 1, "any time": 2000}[moment]
    return rng.randint(1, most)


def disks(rng: random.Random, share: float) -> Iterator[Trial]:
    """Every call that writes, failing once, twice, or until the end."""
    for what, number in ERRORS.items():
        for call in DISK:
            for _ in range(max(1, round(share * 8))):
                arch, times = rng.choice(list(ARCHITECTURES)), rng.choice([1, 2, 10**6])
                first = rng.randint(1, {"write": 400, "fsync": 20, "replace": 12}[call])
                attempt = functools.partial(trials.failing_disk, arch, call, number, first, times)
                yield Trial(f"{what} in {call}", f"{arch} from call {first}, {times} times", attempt)


def files(rng: random.Random, share: float) -> Iterator[Trial]:
    """Checkpoints, dictionaries, binarised data and indices, damaged in every way."""
    for damage in DAMAGES:
        for _ in range(max(1, round(share * 10))):
            arch, seed = rng.choice(list(ARCHITECTURES)), rng.randrange(10**6)
            attempt = functools.partial(trials.damaged_checkpoint, arch, damage, seed)
            yield Trial(f"checkpoint_last.pt: {damage}", f"{arch} seed {seed}", attempt)
        for name in DATA:
            for _ in range(max(1, round(share * 8))):
                arch, seed = rng.choice(list(ARCHITECTURES)), rng.randrange(10**6)
                attempt = functools.partial(trials.damaged_data, arch, name, damage, seed)
                yield Trial(f"{name}: {damage}", f"{arch} seed {seed}", attempt)


def all_trials(seed: int, share: float, only: str = "", strikes: int = STRIKES) -> list[Trial]:
    """The campaign's trials; a share of 1 is the whole, and a small one has one of every row."""
    rng = random.Random(seed)
    found = list(signals(rng, share, strikes))
    found += [trial for make in (disks, files) for trial in make(rng, share)]
    # In any order, so that the first minutes have faults of every kind.
    rng.shuffle(found)
    return [trial for trial in found if only in trial.row]


def attempt(trial: Trial, bench: Bench, place: Path) -> tuple[int, str | None]:
    """Run a trial in a new folder: the faults that it has met, and what went wrong if it has not survived them.

    The folder is removed if it has.
    """
    place.mkdir(parents=True)
    try:
        faults = trial.run(bench, place)
    except AssertionError as error:
        return 1, str(error) or type(error).__name__
    shutil.rmtree(place)
    return faults, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the whole campaign (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments and places (default: 1)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many (default: all)")
    parser.add_argument("--only", default="", help="only rows that contain this")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    bench, wrong = Bench(place), 0
    rows: dict[str, list[int]] = {}
    end = time.monotonic() + 60 * args.minutes
    for number, trial in enumerate(tqdm(all_trials(args.seed, args.share, args.only), unit="run", smoothing=0)):
        if time.monotonic() > end:
            break
        faults, problem = attempt(trial, bench, place / str(number))
        tried = rows.setdefault(trial.row, [0, 0])
        tried[0] += faults
        tried[1] += faults if problem is None else 0
        if problem is not None:
            wrong += 1
            tqdm.write(f"NOT SURVIVED: {trial.row}: {trial.name} (see {place / str(number)})\n{problem}")
    rows["all"] = [sum(column) for column in zip(*rows.values())]
    width = max(map(len, rows))
    print(f"| {'fault':{width}} | tried | survived |\n| {'-' * width} | ----- | -------- |")
    for row, (tried_, survived) in sorted(rows.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"| {row:{width}} | {tried_:5} | {survived:8} |")
    if not wrong:
        shutil.rmtree(place)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
