"""The number of updates of an epoch, as fairseq's own iterator counts them."""

from pathlib import Path

import pytest
from fairseq import tasks

from fairseq_ms.commands.config import updates_of_an_epoch
from tests.helpers.trained import configuration, random_lines, write_corpus


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """83 sentences of 1 to 11 tokens: neither rows nor batches come out even."""
    lines = [line[: 3 * (number % 11)] for number, line in enumerate(random_lines(4, 83, words=10))]
    return write_corpus(tmp_path_factory.mktemp("epochs"), {"train": lines})


@pytest.mark.parametrize(("break_mode", "tokens"), [("none", 7), ("none", 64), ("eos", 64)])
def test_an_epoch_has_as_many_updates_as_fairseq_makes(data: Path, break_mode: str, tokens: int) -> None:
    flags = ["--arch", "transformer_lm", "--sample-break-mode", break_mode, "--tokens-per-sample", tokens]
    task = tasks.setup_task(configuration("language_modeling", [data, *flags]).task)
    task.load_dataset("train")
    for rows, processes, frequency in ((4, 1, 1), (1, 4, 1), (2, 1, 2), (5, 1, 1)):
        limits = {"max_sentences": rows, "num_shards": processes, "disable_iterator_cache": True}
        batches = task.get_batch_iterator(task.dataset("train"), **limits).next_epoch_itr()
        found = updates_of_an_epoch(data / "train", tokens, break_mode, rows * processes * frequency)
        assert found == -(-len(batches) // frequency), (rows, processes, frequency)
