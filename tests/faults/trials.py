"""Trials: a tiny run meets a fault, and afterwards the same command ends as the uninterrupted run has ended.

Losses, gradient norms and final weights are compared bit for bit. Where a run cannot go on, one sentence is printed.
"""

from __future__ import annotations

import errno
import functools
import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fairseq_ms.host.checkpoints import defect
from tests.faults import injections
from tests.faults.damages import DAMAGES
from tests.helpers.forked import curve, rank_log, run
from tests.helpers.resumed import HAED, RETINA, TRANSFORMER_XL, assert_same_weights, tiny_training, write_parts

# One architecture of each family.
ARCHITECTURES = {
    "retina_lm": ("--arch", "retina_lm", *RETINA),
    "transformer_xl": (*TRANSFORMER_XL, "--tokens-per-sample", "3", "--mem-len", "5"),
    "haed": ("--arch", "haed", *HAED, "--max-segment-len", "3"),
}
SCHEDULE = ("--max-epoch", "3", "--save-interval-updates", "2", "--keep-interval-updates", "2")
ERRORS = {"full disk": errno.ENOSPC, "input/output error": errno.EIO}


class Failed(AssertionError):
    """A fault was not survived."""


@dataclass(frozen=True)
class Trial:
    """One run and its faults: the row of the table they count for, and how it is tried in a new folder.

    ``run`` returns how many faults it has met, all of which it has survived, and raises Failed otherwise.
    """

    row: str
    name: str
    run: Callable[[Bench, Path], int]


class Bench:
    """Where trials are run: the corpus, and the uninterrupted runs they are compared with."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.folders = write_parts(place / "corpus")[:1]

    @functools.cache  # noqa: B019  (as long as the campaign lasts)
    def whole(self, arch: str, ranks: int) -> Path:
        """The folder of an uninterrupted run, whose losses are in ``log``."""
        folder = self.place / f"{arch}-{ranks}"
        folder.mkdir()
        codes = run(self.command(arch, folder / "run"), folder / "log", ranks)
        require(codes == [0] * ranks, f"the uninterrupted run ended with {codes}", folder / "log")
        return folder

    def command(self, arch: str, save_dir: Path, *more: str, data: Path | None = None) -> list[str]:
        return tiny_training([data or self.folders[0]], save_dir, *ARCHITECTURES[arch], *SCHEDULE, *more)


def require(holds: bool, otherwise: str, log: Path) -> None:
    if not holds:
        raise Failed(f"{otherwise}\n{log.read_text()[-2000:]}")


def met(place: Path) -> int:
    """How often a fault was met in a trial's folder."""
    return (place / "met").stat().st_size if (place / "met").exists() else 0


def require_sentence(log: Path) -> None:
    """That a run which failed has said why, in the last line and without a traceback."""
    printed = log.read_text()
    lines = printed.splitlines()
    told = lines and re.match(r"(\[rank\d\]: )?fairseq-train: error: ", lines[-1])
    require(bool(told) and "Traceback" not in printed, "not ended by one sentence", log)


def require_whole(save_dir: Path, log: Path) -> None:
    """That every checkpoint in a folder is as it was written, under a name that fairseq reads or a temporary one."""
    for path in save_dir.glob("*.pt"):
        require(defect(str(path)) is None, f"{path.name} is damaged", log)


def require_same(bench: Bench, arch: str, ranks: int, folder: Path, logs: list[Path], lost: int = 0) -> None:
    """That what all starts of a run printed together, and its last checkpoint, are those of the uninterrupted run.

    ``lost``: how many ends of an epoch may have been killed between their checkpoint and the line they print.
    """
    whole = bench.whole(arch, ranks)
    expected = curve(whole / "log")
    printed: dict[tuple[str, str], dict[str, str]] = {}
    for log in logs:
        again = curve(log)
        wrong = [place for place, record in again.items() if expected.get(place) != record]
        require(not wrong, f"others than in the uninterrupted run: {wrong}", log)
        printed |= again
    missing = [place for place in expected if place not in printed]
    silent = [place for place in missing if place[0] == "train"]
    require(len(missing) <= lost and missing == silent, f"never printed: {missing}", logs[-1])
    assert_same_weights(whole / "run", folder / "run")
    require(not list((folder / "run").glob("*.tmp")), "half a checkpoint is left", logs[-1])


def finish(bench: Bench, arch: str, ranks: int, folder: Path, logs: list[Path], lost: int = 0) -> None:
    """Repeat the command without a fault, and compare."""
    log = folder / "last.log"
    codes = run(bench.command(arch, folder / "run"), log, ranks)
    require(codes == [0] * ranks, f"resumed, the run ended with {codes}", log)
    require_same(bench, arch, ranks, folder, [*logs, log], lost)


def signalled(
    arch: str,
    ranks: int,
    signum: int,
    struck: tuple[int, ...],
    strikes: list[tuple[str, int]],
    bench: Bench,
    place: Path,
) -> int:
    """A run is struck several times, each time by a signal at another moment, and then goes on to its end."""
    logs: list[Path] = []
    for moment, count in strikes:
        log = place / f"{len(logs)}.log"
        fault = functools.partial(injections.strike, moment, count, signum, struck, place / "met")
        codes = run(bench.command(arch, place / "run"), log, ranks, fault)
        logs.append(log)
        require(None not in codes, f"a rank hangs after {moment} {count}: {codes}", log)
        if codes == [0] * ranks:
            break
        if signum == signal.SIGKILL:
            # The first of two that are struck may take the second with it, before its own moment has come.
            alone = {rank for rank in range(ranks) if rank not in struck or (codes[rank] == 1 and -signum in codes)}
            require(all(codes[rank] in (-signum, 0) for rank in set(struck) - alone), f"ended with {codes}", log)
            for rank in alone:
                require(codes[rank] == 1, f"rank {rank} ended with {codes[rank]}", rank_log(log, rank))
        else:
            # Before training begins, a signal ends a process at once, and the others with it.
            stopped, early = codes == [128 + signum] * ranks, -signum in codes
            require(stopped or (early and moment == "any time"), f"ended with {codes}", log)
            require(early or "Traceback" not in log.read_text(), "not ended silently", log)
        require_whole(place / "run", log)
    finish(bench, arch, ranks, place, logs, lost=len(strikes) if signum == signal.SIGKILL else 0)
    # Ranks that are struck together are struck once.
    return met(place) // len(struck)


def failing_disk(arch: str, call: str, number: int, count: int, times: int, bench: Bench, place: Path) -> int:
    """A call by which checkpoints are written fails a few times or from then on."""
    log = place / "0.log"
    fault = functools.partial(injections.fail, call, number, count, times, place / "met")
    codes = run(bench.command(arch, place / "run"), log, 1, fault)
    if codes != [0]:
        require(codes == [1], f"ended with {codes}", log)
        require_sentence(log)
    require(not list((place / "run").glob("*.tmp")), "half a checkpoint is left", log)
    require_whole(place / "run", log)
    finish(bench, arch, 1, place, [log])
    return met(place)


def damaged_checkpoint(arch: str, damage: str, seed: int, bench: Bench, place: Path) -> int:
    """``checkpoint_last.pt`` of an unfinished run is damaged."""
    rng, log = random.Random(seed), place / "0.log"
    fault = functools.partial(injections.strike, "update", rng.randint(4, 15), signal.SIGTERM, (0,), None)
    run(bench.command(arch, place / "run"), log, 1, fault)
    last = place / "run" / "checkpoint_last.pt"
    kept = last.read_bytes()
    DAMAGES[damage](last, rng)
    again = place / "1.log"
    codes = run(bench.command(arch, place / "run"), again)
    require(not Path(f"{last}.run").exists(), "code in a checkpoint was run", again)
    if codes == [0]:
        require_same(bench, arch, 1, place, [log, again])
        return 1
    require(codes == [1], f"ended with {codes}", again)
    require_sentence(again)
    last.write_bytes(kept)
    finish(bench, arch, 1, place, [log])
    return 1


def damaged_data(arch: str, name: str, damage: str, seed: int, bench: Bench, place: Path) -> int:
    """A file of the data is damaged: the run is the same, or it ends with one sentence before its first update."""
    data, log = place / "data", place / "0.log"
    shutil.copytree(bench.folders[0], data)
    DAMAGES[damage](data / name, random.Random(seed))
    codes = run(bench.command(arch, place / "run", data=data), log)
    require(not Path(f"{data / name}.run").exists(), "code in the data was run", log)
    if codes == [0]:
        require_same(bench, arch, 1, place, [log])
        return 1
    require(codes == [1], f"ended with {codes}", log)
    require_sentence(log)
    require(not curve(log), "found when training had begun", log)
    return 1
