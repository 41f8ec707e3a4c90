"""``fairseq-interactive`` answers every line it is given, whatever bytes the line holds.

fairseq opens its input as text: a byte that is no UTF-8 ends the run, with a traceback and the lines of a buffer
unanswered, and a carriage return in the middle of a line makes two lines of it, which shifts all later numbers. Its
task also keeps the batches of every buffer for a next epoch, which never comes.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, BinaryIO

from fairseq_ms.errors import UsageError

logger = logging.getLogger(__name__)

_COMMAND = "fairseq_cli.interactive"
_TOO_LONG = re.compile(r"^Size of sample #(\d+) is invalid \(=\(?(\d+).* since max_positions=\(?(\d+)")


def install() -> None:
    """Patch the command if this process runs it; calling it again does nothing."""
    for module in [sys.modules.get(_COMMAND), sys.modules.get("__main__")]:
        named = getattr(getattr(module, "__spec__", None), "name", None) == _COMMAND
        if module is not None and named and not hasattr(module.buffered_read, "__self__"):
            _patch(module)


def _patch(module: ModuleType) -> None:
    """Replace ``buffered_read`` and ``make_batches``, which ``main`` looks up when it calls them."""
    numbered = Numbered(module.make_batches)
    module.buffered_read = numbered.buffered_read  # type: ignore[attr-defined]
    module.make_batches = numbered.make_batches  # type: ignore[attr-defined]


class Numbered:
    """fairseq's reading and batching of lines, which counts the lines that it has handed out.

    Args:
        make_batches: fairseq's own.
    """

    def __init__(self, make_batches: Callable[..., Iterator[Any]]) -> None:
        self.batches_of = make_batches
        self.read = 0

    def buffered_read(self, source: str, buffer_size: int) -> Iterator[list[str]]:
        """Lines of a file, or of standard input for "-", in lists of up to ``buffer_size``."""
        if source == "-":
            yield from self._buffers(sys.stdin.buffer, buffer_size)
            return
        try:
            file = open(source, "rb")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise UsageError(f"--input must be a file that can be read: got {source} ({error.strerror})") from error
        with file:
            yield from self._buffers(file, buffer_size)

    def _buffers(self, file: BinaryIO, size: int) -> Iterator[list[str]]:
        buffer: list[str] = []
        for line in file:
            # A byte that belongs to no character makes its word an unknown one.
            buffer.append(line.decode("utf-8", errors="replace").strip())
            if len(buffer) == size:
                self.read += size
                yield buffer
                buffer = []
        if buffer:
            self.read += len(buffer)
            yield buffer

    def make_batches(self, lines: list[str], cfg: Any, task: Any, *args: Any, **settings: Any) -> Iterator[Any]:
        """fairseq's batches; lines without room are named by their numbers in the whole input."""
        before = self.read - len(lines)
        missing = set(range(len(lines)))
        try:
            for batch in self.batches_of(lines, cfg, task, *args, **settings):
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
            logger.warning("left out, longer than the model's positions: %s", _listed(before, missing))


def _listed(before: int, places: set[int]) -> str:
    numbers = ", ".join(str(before + place + 1) for place in sorted(places))
    return f"line {numbers}" if len(places) == 1 else f"lines {numbers}"
