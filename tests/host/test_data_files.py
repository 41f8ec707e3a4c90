"""Damaged data and dictionaries: one sentence before training, and a resumed run reads the data it began with."""

from __future__ import annotations

import functools
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils

from fairseq_ms.errors import UsageError
from tests.faults.injections import strike
from tests.helpers.forked import run
from tests.helpers.resumed import TINY, assert_same_weights, tiny_training, write_parts

FLAGS = ("--arch", "vanilla_lm", *TINY, "--decoder-layers", "1", "--max-epoch", "2")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_parts(tmp_path / "corpus")[0]


def load(data: Path, dictionary: Dictionary | None = None) -> object:
    return data_utils.load_indexed_dataset(str(data / "train"), dictionary)


def overwrite(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    place %= len(whole)
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


def zero_from(path: Path, place: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + bytes(len(whole) - place))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda data: (data / "train.idx").write_bytes(b"MMID"), "train.idx is cut off"),
        (lambda data: overwrite(data / "train.idx", 0, b"XX"), "train.idx is no index of a data set"),
        (lambda data: overwrite(data / "train.idx", 17, b"\x63"), "train.idx is no index of a data set"),
        (lambda data: overwrite(data / "train.idx", 18, b"\x03"), "train.idx has not the size of an index of 3"),
        (lambda data: overwrite(data / "train.idx", 26, b"\x07"), "do not fit together"),
        (lambda data: overwrite(data / "train.idx", -8, b"\x01"), "do not fit together"),
        (lambda data: zero_from(data / "train.idx", 26), "do not fit together"),
        (lambda data: overwrite(data / "train.idx", -5, b"\x80"), "do not fit together"),
        (lambda data: (data / "train.bin").write_bytes(b"\4\0" * 7), "do not fit together"),
        (lambda data: overwrite(data / "train.bin", 8, b"\xff\xff"), "tokens that are not among the dictionary's 14"),
    ],
)
def test_data_that_do_not_fit_together_are_one_sentence(
    change: Callable[[Path], object], wrong: str, data: Path
) -> None:
    dictionary = Dictionary.load(str(data / "dict.txt"))
    assert load(data, dictionary) is not None
    change(data)
    with pytest.raises(UsageError, match=f"DATA must be as fairseq-preprocess wrote it: .*{wrong}"):
        load(data, dictionary)


def test_every_flipped_bit_of_an_index_is_found_but_for_the_length_of_the_last_sentence(data: Path) -> None:
    path = data / "train.idx"
    whole = path.read_bytes()
    sentences = whole[18]
    last_length = range(26 + 4 * (sentences - 1), 26 + 4 * sentences)
    rng = random.Random(3)
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        # Code 8 is uint16, and code 3, of int16, has the same values for a dictionary of this size.
        if place not in last_length and place != 17:
            with pytest.raises(UsageError):
                load(data)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"w0 3\nw1", "a line of its dictionary is no symbol and count, 'w1'"),
        (b"w0 3\nw0 2\n", "its dictionary has 'w0' twice"),
        (b"\x80\x04\x95 3\n", "dict.txt is not text in UTF-8"),
        (b"w0 3\n", "train.bin has tokens that are not among the dictionary's 5 symbols"),
    ],
)
def test_a_damaged_dictionary_is_one_sentence(content: bytes, wrong: str, data: Path, tmp_path: Path) -> None:
    (data / "dict.txt").write_bytes(content)
    (data / "valid.bin").write_bytes(b"\4\0" * (data / "valid.bin").stat().st_size)
    assert run(tiny_training([data], tmp_path / "run", *FLAGS), tmp_path / "log") == [1]
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    last = printed.splitlines()[-1]
    assert last.startswith("fairseq-train: error: DATA must be as fairseq-preprocess wrote it: ")
    if "train.bin" not in wrong:
        assert wrong in last


def test_a_run_is_resumed_with_the_data_it_began_with_or_not_at_all(data: Path, tmp_path: Path) -> None:
    """A token that has become another of the dictionary, which nothing else shows."""
    whole = tmp_path / "whole"
    assert run(tiny_training([data], whole, *FLAGS), tmp_path / "log") == [0]
    command = tiny_training([data], tmp_path / "run", *FLAGS)
    fault = functools.partial(strike, "update", 3, signal.SIGTERM, (0,), False, None)
    assert run(command, tmp_path / "log", 1, fault) == [143]
    kept = (data / "train.bin").read_bytes()
    overwrite(data / "train.bin", 4, bytes([kept[4] ^ 1]))
    assert run(command, tmp_path / "log") == [1]
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith(
        f"fairseq-train: error: DATA must be what the checkpoint was trained on: {data / 'train.bin'}"
    )
    for begun in ((*command, "--reset-dataloader"), tiny_training([moved(data)], tmp_path / "run", *FLAGS)):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "run", copy)
        place = list(begun).index("--save-dir") + 1
        assert run([*begun[:place], str(copy), *begun[place + 1 :]], tmp_path / "log") == [0]
        shutil.rmtree(copy)
    # A model that is fine-tuned has data of its own, perhaps in the same place.
    pretrained = tmp_path / "run" / "checkpoint_last.pt"
    tuned = tiny_training([data], tmp_path / "tuned", *FLAGS, "--finetune-from-model", str(pretrained))
    assert run(tuned, tmp_path / "log") == [0], (tmp_path / "log").read_text()
    (data / "train.bin").write_bytes(kept)
    assert run(command, tmp_path / "log") == [0]
    assert_same_weights(whole, tmp_path / "run")


def moved(data: Path) -> Path:
    """The same corpus elsewhere, about which a checkpoint says nothing."""
    return Path(shutil.copytree(data, data.parent / "moved"))
