"""``fairseq-interactive`` answers every line it is given, whatever bytes the line holds.

fairseq opens its input as text: a byte that is not UTF-8 ends the run in a traceback, and a carriage return within a
line splits it, which shifts all later numbers. Its task also keeps the batches of every buffer for another epoch.
"""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fairseq_ms.errors import UsageError
from fairseq_ms.host import rules

logger = logging.getLogger(__name__)

_TOO_LONG = re.compile(r"^Size of sample #(\d+) is invalid \(=\(?(\d+).* since max_positions=\(?(\d+)")


class Numbered:
    """fairseq's reading and batching of lines, which counts the lines that it has handed out."""

    def __init__(self) -> None:
        self.count = 0

    def read(self, original: Callable[..., Any], input: str, buffer_size: int) -> Iterator[list[str]]:
        """``buffered_read``: lines of a file, or of standard input for "-", in lists of up to ``buffer_size``."""
        try:
            file = sys.stdin.buffer if input == "-" else open(input, "rb")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise UsageError(f"--input must be a file that can be read: got {input} ({error.strerror})") from error
        with file:
            # A byte that belongs to no character makes its word an unknown one. White space counts where text is bytes.
            while buffer := [line.decode(errors="replace") for line in itertools.islice(file, buffer_size)]:
                if self.count == 0:
                    buffer[0] = buffer[0].removeprefix("\ufeff")
                buffer = [line.removesuffix("\n") for line in buffer]
                self.count += len(buffer)
                yield buffer

    def batch(
        self, original: Callable[..., Any], lines: list[str], cfg: Any, task: Any, *args: Any, **settings: Any
    ) -> Iterator[Any]:
        """``make_batches``; lines without room are named by their numbers in the whole input."""
        rules.refuse_idle(
            getattr(cfg, "generation", None), ("score_reference", "prefix_size", "lm_path"), "lines without a reference"
        )
        before = self.count - len(lines)
        missing = set(range(len(lines)))
        try:
            for batch in original(lines, cfg, task, *args, **settings):
                missing.difference_update(batch.ids.tolist())
                yield batch
        except Exception as error:
            found = _TOO_LONG.search(str(error))
            if found is None:
                raise
            place, size, most = (int(number) for number in found.groups())
            raise UsageError(
                f"--skip-invalid-size-inputs-valid-test must be given to leave out lines longer than the model's "
                f"{most} positions: line {before + place + 1} has {size} tokens"
            ) from None
        finally:
            task.dataset_to_epoch_iter.clear()
        if missing:
            numbers = ", ".join(str(before + place + 1) for place in sorted(missing))
            logger.warning(f"left out, longer than the model's positions: line {numbers}")
