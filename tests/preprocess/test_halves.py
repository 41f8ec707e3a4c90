"""Two folders that share everything but the training sentences."""

from pathlib import Path

import numpy as np
import pytest
from fairseq.data import data_utils

from fairseq_ms_pipeline import binarise
from fairseq_ms_pipeline.files import read_json
from fairseq_ms_pipeline.halves import write_halves
from fairseq_ms_pipeline.run import run
from tests.preprocess.sample import job_of, write_sample


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halves")
    run(job_of(write_sample(folder / "sample.txt"), folder / "out"))
    return folder / "out"


def sentences(folder: Path, split: str) -> list[list[int]]:
    return [item.tolist() for item in data_utils.load_indexed_dataset(str(folder / split))]


def test_the_halves_are_the_training_data_in_order_and_about_equally_long(prepared: Path) -> None:
    first, second = (sentences(prepared / "halves" / half, "train") for half in ("first", "second"))
    assert first + second == sentences(prepared / "bin", "train")
    lengths = [sum(map(len, half)) for half in (first, second)]
    # The cut is at a sentence's end.
    assert abs(lengths[0] - lengths[1]) <= max(map(len, first + second))


@pytest.mark.parametrize("half", ["first", "second"])
def test_a_half_has_the_dictionary_and_the_other_splits_of_the_whole(prepared: Path, half: str) -> None:
    folder = prepared / "halves" / half
    assert (folder / "dict.txt").read_bytes() == (prepared / "bin" / "dict.txt").read_bytes()
    for split in ("valid", "test"):
        assert sentences(folder, split) == sentences(prepared / "bin", split)


def test_the_halves_take_no_room_and_the_manifest_lists_what_is_new(prepared: Path) -> None:
    listed = {name for name in read_json(prepared / "manifest.json")["files"] if name.startswith("halves/")}
    assert listed == {"halves/first/train.idx", "halves/second/train.idx"}
    assert (prepared / "halves" / "first" / "train.bin").resolve() == (prepared / "bin" / "train.bin").resolve()


def test_training_data_of_one_sentence_has_no_halves(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    binarise.write_shard(np.array([4, 5, 2]), [3], tmp_path / "bin" / "train", 300)
    write_halves(tmp_path)
    assert not (tmp_path / "halves").exists()
