"""Progress bars with rate and time left, and the time and memory each stage took."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Progress:
    """Announces numbered stages on standard error and remembers what each of them took."""

    def __init__(self, stages: int, quiet: bool = False) -> None:
        self.stages = stages
        self.quiet = quiet
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str = "B") -> Iterator[tqdm]:
        """Show the bar of one stage; `total` counts bytes, or things named by `unit`."""
        stage = len(self.seconds) + 1
        start = time.monotonic()
        with tqdm(
            total=total,
            desc=f"{stage}/{self.stages} {name}",
            unit=unit,
            unit_scale=True,
            file=sys.stderr,
            disable=self.quiet,
            mininterval=0.5,
        ) as bar:
            yield bar
        self.seconds[name] = time.monotonic() - start

    def report(self) -> str:
        """One line per stage with its seconds, and the peak memory of the largest process."""
        rows = {**self.seconds, "all stages": sum(self.seconds.values())}
        lines = [f"  {name:<{max(map(len, rows))}} {seconds:8.1f} s" for name, seconds in rows.items()]
        here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        lines.append(f"  peak memory: {here / 1024:.0f} MB here, {workers / 1024:.0f} MB in the largest worker")
        return "\n".join(lines)
