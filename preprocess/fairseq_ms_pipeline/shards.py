"""Stage 1, second half: the lines of every split, cut into shards of bounded size at line ends."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.documents import Line
from fairseq_ms_pipeline.files import complete_text, read_json, write_json

INDEX = "read.json"


class _SplitWriter:
    """Collects the lines of one split and writes a shard whenever enough are there."""

    def __init__(self, split: str, raw: Path, shard_bytes: int) -> None:
        self.split, self.raw, self.shard_bytes = split, raw, shard_bytes
        self.documents = self.lines = 0
        self.shards: list[str] = []
        self._lines: list[str] = []
        self._bytes = 0

    def add(self, line: Line) -> None:
        self.documents += line.starts_document
        self.lines += 1
        self._lines.append(line.text)
        self._bytes += len(line.text.encode()) + 1
        if self._bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        if not self._lines:
            return
        # Names sort in the order of the text.
        name = f"{self.split}-{len(self.shards):06d}"
        # What an interrupted run has written is not written again.
        if not (self.raw / f"{name}.txt").exists():
            with complete_text(self.raw / f"{name}.txt") as file:
                file.writelines(line + "\n" for line in self._lines)
        self.shards.append(name)
        self._lines, self._bytes = [], 0


def write_shards(lines: Iterable[Line], raw: Path, dataset: Dataset) -> dict[str, dict]:
    """Cut all lines into shards under `raw`, except those that are there already from an interrupted run.

    Returns for each split its shard names and its number of documents; ValueError when a split is empty.
    """
    index = raw / INDEX
    if index.exists():
        return read_json(index)
    writers = {split: _SplitWriter(split, raw, dataset.shard_bytes) for split in SPLITS}
    for line in lines:
        writers[line.split].add(line)
    for writer in writers.values():
        writer.flush()
    if empty := [split for split, writer in writers.items() if not writer.shards]:
        advice = _advice(dataset, empty, sum(writer.lines for writer in writers.values()))
        raise ValueError(f"--input has no text for the split {' or '.join(empty)}: {advice}.")
    found = {split: {"shards": w.shards, "documents": w.documents} for split, w in writers.items()}
    write_json(index, found)
    return found


def _advice(dataset: Dataset, empty: list[str], lines: int) -> str:
    """How text comes into empty splits, by what the data set goes by: names or, of your own text, flags."""
    if dataset.split_names:
        return f"name its files {', '.join(SPLITS)}"
    if dataset.name != "text":
        return "give it more text"
    if lines < len(SPLITS):
        return f"give it more text, at least {len(SPLITS)} lines"
    lines_each = 1 if dataset.documents == "ends" else int(dataset.documents.partition(":")[2] or 100) // 10 or 1
    ways = [f"--documents lines:{lines_each}"] if dataset.documents not in ("line", "lines:1") else []
    # Where nothing is left to train on, larger fractions leave less.
    ways += [f"a larger --{split}-fraction" for split in empty if "train" not in empty]
    return f"name its files {', '.join(SPLITS)}, or give {' or '.join(ways)}" if ways else "give it more text"
