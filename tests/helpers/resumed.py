"""Tiny runs of ``fairseq-train`` that are interrupted and resumed, and what has to be the same afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.cli import USER_DIR
from tests.helpers.trained import random_lines, write_corpus

TINY = ("--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "12", "--decoder-attention-heads", "2")
RETINA = (*TINY, "--decoder-layers", "2", "--scale-windows", "1x=0:4,2x=4:12", "--scale-heads", "1x=1,2x=1")
TRANSFORMER_XL = ("--task", "streaming_language_modeling", "--arch", "transformer_xl", *TINY, "--decoder-layers", "2")
HAED = ("--encoder", "mlp", "--main", "transformer", "--decoder", "lstm", "--segmentation", "fixed")


def write_parts(folder: Path) -> list[Path]:
    """Two parts of a corpus, of lines of 5 and of 6 words, with one dictionary."""
    words = ["w0 w1 w2 w3 w4", "w5 w6 w7 w8 w9"]
    parts = [random_lines(index, 9 - index, words=10, length=5 + index) for index in range(2)]
    return [
        write_corpus(folder / str(index), {"train": [*lines, *words], "valid": words})
        for index, lines in enumerate(parts)
    ]


def tiny_training(folders: Sequence[Path], save_dir: Path, *more: str) -> list[str]:
    """A ``fairseq-train`` that prints every update unless told otherwise."""
    return [
        *("fairseq-train", ":".join(str(folder) for folder in folders), "--user-dir", str(USER_DIR)),
        *("--cpu", "--task", "language_modeling", "--tokens-per-sample", "5"),
        *("--batch-size", "2", "--num-workers", "0", "--dropout", "0.1"),
        *("--optimizer", "adam", "--lr", "0.002", "--clip-norm", "1.0", "--no-epoch-checkpoints"),
        *("--log-format", "json", "--log-interval", "1", "--save-dir", str(save_dir), *more),
    ]


def equal(one: Any, other: Any) -> bool:
    """Whether two batches or states are the same, whatever they are made of."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def assert_same_weights(*save_dirs: Path) -> None:
    """Of the last checkpoints, bit for bit, with the states of optimizer and scaler and with masters."""
    first, second = (torch.load(folder / "checkpoint_last.pt", weights_only=True) for folder in save_dirs)
    assert equal(first["model"], second["model"])
    assert equal(first["last_optimizer_state"], second["last_optimizer_state"])
    for name in ("masters", "loss_scaler"):
        assert equal(first["extra_state"].get(name), second["extra_state"].get(name))
