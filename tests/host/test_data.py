"""Damaged data are one sentence before training, a resumed run reads what it began with, and every batch counts."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import make_builder

from fairseq_ms.errors import UsageError, sentence_of
from fairseq_ms.host import data as host_data
from fairseq_ms.tools import checkpoints
from tests.helpers.cli import USER_DIR, run_cli
from tests.helpers.corpus import large_data
from tests.helpers.faults import strike
from tests.helpers.forked import rank_log, run
from tests.helpers.resumed import TINY, assert_same_weights, tiny_training, write_parts
from tests.helpers.trained import random_lines, write_corpus
from tests.host.test_resuming import Run

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
        (lambda data: (data / "train.idx").write_bytes(b"MMID"), "train.idx is no index"),
        (lambda data: overwrite(data / "train.idx", 0, b"XX"), "train.idx is no index of a data set"),
        (lambda data: overwrite(data / "train.idx", 18, b"\x03"), "train.idx has not the size of an index of 3"),
        (lambda data: zero_from(data / "train.idx", 26), "do not fit together"),
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


def test_the_largest_token_and_the_checksum_are_of_all_chunks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_data, "_CHUNK", 8)
    whole, found = (data / "train.bin").read_bytes(), []
    assert len(whole) > 24
    for number, place in enumerate((None, 2, 8, len(whole) - 2)):
        changed = bytearray(whole)
        if place is not None:
            changed[place : place + 2] = b"\x39\x00"
        (data / "train.bin").write_bytes(changed)
        found.append(host_data._contents(str(data / "train"), np.dtype(np.uint16), (number, 0)))
    assert [largest for largest, _ in found] == [13, 57, 57, 57]
    assert len({checksum for _, checksum in found}) == 4


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


@pytest.mark.parametrize("content", [b"w0 3\nw1", b"w0 3\nw0 2\n", b"\x80\x04\x95 3\n"])
def test_a_damaged_dictionary_is_one_sentence(content: bytes, data: Path) -> None:
    (data / "dict.txt").write_bytes(content)
    with pytest.raises(Exception) as raised:
        Dictionary.load(str(data / "dict.txt"))
    assert str(sentence_of(raised.value)).startswith("DATA must be as fairseq-preprocess wrote it (")


@pytest.mark.slow
def test_a_run_is_resumed_with_the_data_it_began_with_or_not_at_all(data: Path, tmp_path: Path) -> None:
    """A token that has become another of the dictionary, which nothing else shows, wherever the data lie."""
    whole = tmp_path / "whole"
    assert run(tiny_training([data], whole, *FLAGS), tmp_path / "log") == [0]
    command = tiny_training([data], tmp_path / "run", *FLAGS)
    fault = functools.partial(strike, "update", 3, signal.SIGTERM, (0,))
    assert run(command, tmp_path / "log", 1, fault) == [143]
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    moved = shutil.copytree(data, data.parent / "moved")
    kept = (data / "train.bin").read_bytes()
    for folder in (moved, data):
        overwrite(folder / "train.bin", 4, bytes([kept[4] ^ 1]))
        assert run(tiny_training([folder], tmp_path / "run", *FLAGS), tmp_path / "log") == [1]
        last = (tmp_path / "log").read_text().splitlines()[-1]
        assert last.startswith(
            f"fairseq-train: error: DATA must be what the checkpoint was trained on: {folder / 'train.bin'}"
        )
    assert run((*command, "--reset-dataloader"), tmp_path / "log") == [0]
    # A model that is fine-tuned has data of its own, perhaps in the same place.
    pretrained = tmp_path / "kept" / "checkpoint_last.pt"
    tuned = tiny_training([data], tmp_path / "tuned", *FLAGS, "--finetune-from-model", str(pretrained))
    assert run(tuned, tmp_path / "log") == [0], (tmp_path / "log").read_text()
    (moved / "train.bin").write_bytes(kept)
    assert run(tiny_training([moved], tmp_path / "kept", *FLAGS), tmp_path / "log") == [0]
    assert_same_weights(whole, tmp_path / "kept")


@pytest.mark.slow
def test_data_of_fairseqs_older_format_are_read_as_those_of_the_new_one(data: Path, tmp_path: Path) -> None:
    """Whatever flag names it, by several processes at once, which share no place in a file."""
    older = shutil.copytree(data, tmp_path / "older")
    for split in ("train", "valid"):
        builder = make_builder(str(older / f"{split}.bin"), "lazy")
        for line in data_utils.load_indexed_dataset(str(data / split)):
            builder.add_item(line.int())
        builder.finalize(str(older / f"{split}.idx"))
    for folder in (data, older):
        command = tiny_training([folder], tmp_path / f"of {folder.name}", *FLAGS, "--num-workers", "2")
        assert run(command, tmp_path / "log") == [0], (tmp_path / "log").read_text()
    assert_same_weights(tmp_path / f"of {data.name}", tmp_path / "of older")
    expected = [line.tolist() for line in data_utils.load_indexed_dataset(str(data / "train"))]
    for impl in (None, "lazy", "cached"):
        dataset = data_utils.load_indexed_dataset(str(older / "train"), dataset_impl=impl)
        assert [line.tolist() for line in dataset] == expected
        assert dataset.data_file is None


def test_a_model_has_no_other_dictionary_than_its_own(tmp_path: Path) -> None:
    """Of one size, as byte-level BPE gives to every text: in evaluation, fine-tuning and a run that goes on."""
    lines = random_lines(1, 9)
    data = write_corpus(tmp_path / "data", {"train": lines, "valid": lines})
    other = write_corpus(tmp_path / "other", {"train": [*lines, "w22 " * 200], "valid": lines})
    flags, log, last = (*FLAGS, "--max-update", "1"), tmp_path / "log", tmp_path / "run" / "checkpoint_last.pt"
    assert run(tiny_training([data], last.parent, *flags), log) == [0]
    assert checkpoints.load(str(last), str(data), cpu=True)
    with pytest.raises(UsageError, match=f"DATA .* dictionary .*{other}"):
        checkpoints.load(str(last), str(other), cpu=True)
    tuning = (*flags, "--finetune-from-model", str(last))
    for command, flag in (
        (tiny_training([other], last.parent, *flags, "--reset-dataloader"), "--save-dir"),
        (tiny_training([other], tmp_path / "tuned", *tuning), "--finetune-from-model"),
        (["fairseq-eval-lm", other, "--path", last, "--gen-subset", "valid", "--cpu", "--user-dir", USER_DIR], "DATA"),
    ):
        assert run(command, log) == [1]
        assert re.search(f"error: {flag} .*dictionary", log.read_text().splitlines()[-1]), log.read_text()
    state = torch.load(last, weights_only=True)
    del state["extra_state"]["dictionary"]
    torch.save(state, last)
    assert checkpoints.load(str(last), str(other), cpu=True), "written before it was kept"
    (data / "dict.txt").write_text("w0 3\n")
    with pytest.raises(UsageError, match="dictionary"):
        checkpoints.load(str(last), cpu=True)


def test_one_process_reads_the_training_data_and_all_refuse_what_has_changed(data: Path, tmp_path: Path) -> None:
    command = tiny_training([data], tmp_path / "run", *FLAGS)
    log = tmp_path / "log"
    assert run((*command, "--max-epoch", "1"), log, 2, no_checksum_but_in_the_first) == [0, 0], log.read_text()
    content = (data / "train.bin").read_bytes()
    changes = {"what the checkpoint was trained on": (4, content[4] ^ 1), "not among the dictionary's": (5, 9)}
    for wrong, (place, byte) in changes.items():
        overwrite(data / "train.bin", place, bytes([byte]))
        log = tmp_path / f"log{place}"
        assert run(command, log, 2, no_checksum_but_in_the_first) == [1, 1]
        for rank in range(2):
            assert wrong in rank_log(log, rank).read_text().splitlines()[-1]


def no_checksum_but_in_the_first(rank: int) -> None:
    """Of data: all have the dictionary's, which is of bytes."""
    crc32 = zlib.crc32

    def of_bytes(content: bytes, *start: int) -> int:
        assert isinstance(content, bytes)
        return crc32(content, *start)

    if rank > 0:
        zlib.crc32 = of_bytes  # type: ignore[assignment]


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts what the system has read for this process")
def test_sharded_data_are_read_once_over_all_epochs(tmp_path: Path) -> None:
    """By the two checks and by fairseq together."""
    folders = [large_data(tmp_path / part, 2_000_000, 100) for part in ("first", "second")]
    for folder in folders:
        (folder / "dict.txt").write_text("w 1\n")
    flags = ("--task", "language_modeling", "--tokens-per-sample", "20", "--num-workers", "0", "--batch-size", "8")
    trainer = Run(folders, flags)
    before = bytes_read()
    for epoch in range(1, 5):
        trainer.get_train_iterator(epoch, load_dataset=True, disable_iterator_cache=True)
    whole = sum((folder / "train.bin").stat().st_size for folder in folders)
    assert (bytes_read() - before) / whole < 1.3, "times that the data were read"


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


READ_AHEAD = """
import sys
import torch
import fairseq_ms.data
from fairseq.data.iterators import BufferedIterator

class Batches:
    def __len__(self):
        return 1000
    def __iter__(self):
        for _ in range(1000):
            {work}
            yield 0

batches = BufferedIterator({size}, Batches())
next(batches)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("work", "size"),
    [
        # Nearly all of its time, the thread is in an operation of torch.
        pytest.param("torch.rand(3_000_000).sort()", 500, id="at work"),
        pytest.param("pass", 2, id="in front of a full queue"),
    ],
)
def test_a_process_ends_with_its_own_exit_code_while_batches_are_read_ahead(work: str, size: int) -> None:
    done = run_cli("python", "-c", READ_AHEAD.format(work=work, size=size), check=False)
    assert (done.returncode, done.stderr) == (3, "")
