"""A small binarised corpus, and flags for training a tiny model of any architecture on it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ms_pipeline.indexed import dtype_for, write_index
from tests.helpers import trained
from tests.helpers.cli import USER_DIR
from tests.registry import config_module, setting

SPLITS = {"train": 120, "valid": 23, "test": 31}


def write_corpus(folder: Path) -> Path:
    """Sentences of a small language in which words repeat what came before; returns fairseq's data folder."""
    rng = random.Random(5)
    words = [f"word{index}" for index in range(18)]
    splits = {}
    for split, lines in SPLITS.items():
        sentences = []
        for _ in range(lines):
            sentence = [rng.choice(words) for _ in range(rng.randint(1, 3))]
            while len(sentence) < rng.randint(4, 17):
                sentence.append(sentence[-2] if len(sentence) > 1 and rng.random() < 0.6 else rng.choice(words))
            sentences.append(" ".join(sentence))
        (folder / f"{split}.txt").write_text("\n".join(sentences) + "\n")
        splits[split] = sentences
    return trained.write_corpus(folder / "bin", splits)


def large_data(prepared: Path, targets: int, sentences: int) -> Path:
    """A data folder and its halves: lengths that add up to so many targets, over files of zeros that take no room."""
    lengths = np.full(sentences, targets // sentences, np.int32)
    for folder, share in (("bin", lengths), ("halves/first", lengths[::2]), ("halves/second", lengths[1::2])):
        (prepared / folder).mkdir(parents=True)
        starts = 2 * (np.cumsum(share, dtype=np.int64) - share)
        write_index(prepared / folder / "train.idx", dtype_for(8), [share], [starts])
        with open(prepared / folder / "train.bin", "wb") as file:
            file.truncate(2 * int(share.sum(dtype=np.int64)))
    return prepared / "bin"


def random_flags(arch: str, seed: int = 0) -> dict[str, Any]:
    """The architecture's ``seed``-th random configuration, with learned positions: texts have a greatest length."""
    flags = config_module(arch).random_flags(random.Random(f"{arch} {seed}"))
    return {**flags, "positions": "learned"} if "positions" in flags else flags


def model_flags(arch: str) -> list[str]:
    """``random_flags`` as they are given on a command line."""
    flags = ["--arch", arch]
    for name, value in random_flags(arch).items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False and value is not None:
            flags += [flag, str(value)]
    return flags


def train_command(arch: str, data: Path, save_dir: Path, *more: str) -> list[str]:
    """A whole ``fairseq-train`` of a few updates on a CPU."""
    return [
        "fairseq-train",
        str(data),
        *("--user-dir", str(USER_DIR), "--task", setting(arch, "TASK", "language_modeling"), "--cpu"),
        *model_flags(arch),
        *("--criterion", setting(arch, "CRITERION", "cross_entropy")),
        *("--tokens-per-sample", "24", "--batch-size", "4", "--num-workers", "0"),
        *("--optimizer", "adam", "--lr", "0.002", "--clip-norm", "1.0", "--max-update", "8"),
        *("--save-dir", str(save_dir), "--no-epoch-checkpoints", "--log-format", "json", "--log-interval", "1"),
        *more,
    ]
