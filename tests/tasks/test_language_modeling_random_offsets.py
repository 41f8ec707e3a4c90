"""The task whose training blocks begin elsewhere in every epoch, and are otherwise fairseq's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.data import iterators

from fairseq_ms.data.random_offsets import at_random_offset
from fairseq_ms.errors import UsageError
from tests.helpers.resumed import equal
from tests.helpers.trained import configuration, random_lines, write_corpus

TOKENS = 7
EPOCHS = range(1, 9)
OURS = "language_modeling_random_offsets"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 lines of 6 tokens for training, which is no multiple of the block, and 5 for validation."""
    lines = random_lines(1, 30, length=5)
    return write_corpus(tmp_path_factory.mktemp("corpus"), {"train": lines[:25], "valid": lines[25:]})


def task_of(data: Path, *flags: str, name: str = OURS) -> Any:
    arguments = [data, "--task", name, "--arch", "transformer_lm", "--tokens-per-sample", TOKENS, *flags]
    return tasks.setup_task(configuration(name, arguments).task)


def iterator(task: Any, split: str, epoch: int = 1, **more: Any) -> iterators.EpochBatchIterator:
    """As fairseq's trainer makes it; how to shuffle is said in training only."""
    training = {"grouped_shuffling": False} if split == "train" else {}
    if split not in task.datasets:
        task.load_dataset(split)
    return task.get_batch_iterator(task.dataset(split), max_sentences=4, epoch=epoch, **training, **more)


def blocks(task: Any, epoch: int) -> list[dict[str, torch.Tensor]]:
    """The training blocks of an epoch in the order of the corpus."""
    dataset = iterator(task, "train", epoch).dataset
    return [dataset[index] for index in range(len(dataset))]


def corpus(task: Any) -> list[int]:
    return [int(token) for sample in task.dataset("train") for token in sample["target"]]


def test_every_token_is_a_target_once_an_epoch_and_after_the_token_before_it(data: Path) -> None:
    task = task_of(data)
    for epoch in EPOCHS:
        found = blocks(task, epoch)
        targets = torch.cat([block["target"] for block in found]).tolist()
        sources = torch.cat([block["source"] for block in found]).tolist()
        assert targets == corpus(task)
        assert sources == [task.dictionary.eos(), *targets[:-1]]
        batches = iterator(task, "train", epoch).next_epoch_itr()
        trained = [token for batch in batches for token in batch["target"].flatten().tolist() if token != 1]
        assert sorted(trained) == sorted(targets)


def test_all_blocks_but_the_first_and_the_last_are_full_and_their_boundaries_move(data: Path) -> None:
    task = task_of(data)
    firsts = []
    for epoch in EPOCHS:
        lengths = [len(block["target"]) for block in blocks(task, epoch)]
        assert set(lengths[1:-1]) == {TOKENS}
        assert 1 <= min(lengths) <= max(lengths) == TOKENS
        firsts.append(lengths[0])
        assert not task.dataset_to_epoch_iter, "the blocks of past epochs are kept"
    assert len(set(firsts)) > 3, f"blocks begin after {firsts} tokens"


def test_all_offsets_are_equally_likely(data: Path) -> None:
    task = task_of(data)
    task.load_dataset("train")
    drawn = [at_random_offset(task.dataset("train"), TOKENS, (1, epoch)) for epoch in range(1, 701)]
    firsts = torch.tensor([int(dataset.sizes[0]) for dataset in drawn])
    counts = torch.bincount(firsts, minlength=TOKENS + 1)
    assert counts[0] == 0
    # 100 expected of each, with a standard deviation of 9.3.
    assert all(60 <= count <= 140 for count in counts[1:].tolist()), counts


def test_offsets_are_drawn_from_the_seed_and_the_epoch(data: Path) -> None:
    def firsts(*flags: str) -> list[int]:
        task = task_of(data, *flags)
        return [len(blocks(task, epoch)[0]["target"]) for epoch in EPOCHS]

    assert firsts() == firsts("--seed", "1")
    assert firsts() != firsts("--seed", "2")


@pytest.mark.parametrize("split", ["valid", "train"])
def test_blocks_that_are_only_evaluated_are_fairseqs(split: str, data: Path) -> None:
    batches = []
    for name in (OURS, "language_modeling"):
        task = task_of(data, name=name)
        task.load_dataset(split)
        made = task.get_batch_iterator(task.dataset(split), max_sentences=4, epoch=3)
        batches.append(dict(enumerate(made.next_epoch_itr(shuffle=False))))
    assert equal(*batches)


def test_a_corpus_shorter_than_a_block_is_read_whole(tmp_path: Path) -> None:
    task = task_of(write_corpus(tmp_path / "short", {"train": ["w0 w1"]}))
    for epoch in EPOCHS:
        targets = torch.cat([block["target"] for block in blocks(task, epoch)]).tolist()
        assert targets == corpus(task)


def test_what_fairseqs_task_adds_to_a_block_is_added_here(data: Path) -> None:
    task = task_of(data, "--add-bos-token", "--pad-to-fixed-length")
    for batch in iterator(task, "train", 2).next_epoch_itr():
        assert batch["net_input"]["src_tokens"][:, 0].eq(task.dictionary.bos()).all()
        assert batch["net_input"]["src_tokens"].size(1) >= TOKENS


@pytest.mark.parametrize("mode", ["eos", "complete", "complete_doc"])
def test_training_blocks_that_end_with_a_line_are_refused(mode: str, data: Path) -> None:
    task = task_of(data, "--sample-break-mode", mode)
    iterator(task, "valid")
    with pytest.raises(UsageError, match=f"--sample-break-mode must be none .*{OURS}.*: got {mode}"):
        iterator(task, "train")
