"""The training data in two halves, for two phases of training that are to see different text (HAED, Section 4.2).

Each half is a folder for fairseq beside `bin/`: an index of its own over the sentences of `bin/train.bin`, and links to
everything else, so that both have one dictionary and take no room. Copied without `bin/`, a half is of no use.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fairseq_ms_pipeline.indexed import read_index, write_index

FOLDER = "halves"
HALVES = ("first", "second")
_SHARED = ("dict.txt", "train.bin", "valid.bin", "valid.idx", "test.bin", "test.idx")


def write_halves(prepared: Path) -> None:
    """Write `halves/first` and `halves/second` beside the `bin/` of a folder.

    The first ends with the sentence in which the middle of `bin/train.bin` lies. Where there is one sentence only,
    there are no halves.
    """
    binary = prepared / "bin"
    dtype, lengths, starts = read_index(binary / "train.idx")
    sentences = len(lengths)
    if sentences < 2:
        return
    middle = (binary / "train.bin").stat().st_size // 2
    cut = min(max(int(np.searchsorted(starts, middle)), 1), sentences - 1)
    for half, (begin, end) in zip(HALVES, ((0, cut), (cut, sentences)), strict=True):
        folder = prepared / FOLDER / half
        folder.mkdir(parents=True, exist_ok=True)
        write_index(folder / "train.idx", dtype, [lengths[begin:end]], [starts[begin:end]])
        for name in _SHARED:
            link = folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..", "..", binary.name, name))
