"""The number of updates of an epoch, as fairseq's own iterator counts them."""

import random
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from fairseq_ms.commands.config import updates_of_an_epoch
from fairseq_ms_pipeline import binarise, indexed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("epochs")
    rng = random.Random(4)
    sentences = [[rng.randint(4, 40) for _ in range(rng.randint(1, 11))] + [2] for _ in range(83)]
    binarise.write_shard(np.concatenate(sentences), [*map(len, sentences)], folder / "train", 60)
    indexed.write_symbols(folder / "dict.txt", {f"w{number}": 1 for number in range(56)})
    return folder


# 83 sentences of about 580 tokens: neither rows nor batches come out even.
@pytest.mark.parametrize(("break_mode", "tokens"), [("none", 7), ("none", 64), ("eos", 64)])
@pytest.mark.parametrize(("rows", "processes", "frequency"), [(4, 1, 1), (1, 4, 1), (2, 1, 2), (5, 1, 1)])
def test_an_epoch_has_as_many_updates_as_fairseq_makes(
    data: Path, break_mode: str, tokens: int, rows: int, processes: int, frequency: int
) -> None:
    cfg = LanguageModelingConfig(
        data=str(data),
        sample_break_mode=break_mode,
        tokens_per_sample=tokens,
        dataset_impl="mmap",
        shorten_method="none",
        seed=1,
        use_plasma_view=False,
    )
    task = LanguageModelingTask(cfg, Dictionary.load(str(data / "dict.txt")))
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=rows, num_shards=processes)
    updates = -(-len(batches.next_epoch_itr()) // frequency)
    assert updates_of_an_epoch(data / "train", tokens, break_mode, rows * processes * frequency) == updates
