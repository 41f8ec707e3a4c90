"""The file of JSON lines that measuring leaves: first what was measured on what, then a line for every row."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from benchmarks.table import Record
from fairseq_ms.errors import UsageError


class Records:
    """Appends lines, each as soon as there is one, and reads them again; of two with one key the later counts.

    Args:
        path: the file, in a folder that exists; None to keep the lines in memory
        machine: what the numbers depend on, which lines of one file have in common

    Raises UsageError where the file has lines of another machine.
    """

    def __init__(self, path: Path | None, machine: Mapping[str, object]) -> None:
        self.path = path
        lines = self._read()
        if lines and lines[0].get("machine") != dict(machine):
            theirs = ", ".join(str(value) for value in lines[0].get("machine", {}).values())
            raise UsageError(
                f"--records must name a file that this machine has written, or a new one: {path} is of {theirs}"
            )
        self._drop_an_unfinished_line()
        self.lines: list[Record] = lines[1:]
        if not lines:
            self._write({"machine": dict(machine)})

    def append(self, record: Record) -> None:
        """Write a row's line."""
        self.lines.append(record)
        self._write(record)

    def by_key(self) -> dict[str, Record]:
        """The last line of every row."""
        return {line["key"]: line for line in self.lines}

    def _read(self) -> list[Record]:
        """The finished lines: a process that was killed may have left half of one."""
        if self.path is None or not self.path.exists():
            return []
        whole, _, half = self.path.read_bytes().rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            lines = [None]
        if not all(isinstance(line, dict) for line in lines) or (half and not half.startswith(b'{"')):
            raise UsageError(f"--records must name a file that this command has written, or a new one: got {self.path}")
        return lines

    def _write(self, line: Mapping[str, object]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _drop_an_unfinished_line(self) -> None:
        if self.path is not None and self.path.exists():
            with self.path.open("r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
