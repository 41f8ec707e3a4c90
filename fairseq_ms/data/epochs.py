"""How many updates an epoch has."""

from __future__ import annotations

from pathlib import Path

from fairseq.data import data_utils


def updates_of_an_epoch(split: Path, tokens: int, break_mode: str, rows: int) -> int:
    """Updates of one epoch, read from the data's index.

    Args:
        split: its path without .bin and .idx.
        tokens: of a row, T.
        break_mode: fairseq's ``--sample-break-mode``: "none", rows of T tokens each, or "eos", a row a sentence.
        rows: of an update, over all processes and accumulated gradients.
    """
    assert break_mode in ("none", "eos"), break_mode
    # Kept in a variable: the lengths are views into the file that it maps.
    sentences = data_utils.load_indexed_dataset(str(split), None)
    count = len(sentences) if break_mode == "eos" else -(-int(sentences.sizes.sum()) // tokens)
    return -(-count // rows)
