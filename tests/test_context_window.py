"""Strided evaluation: every target once, in the window fairseq would give it, whoever makes the batches."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import LMContextWindowDataset, MonolingualDataset, TokenBlockDataset
from fairseq.tasks import language_modeling

from fairseq_ms.data.context_window import ContextWindowDataset
from tests.helpers.trained import TINY, write_checkpoint, write_corpus
from tests.registry import dictionary

WORDS = dictionary(50)


def blocks(rng: random.Random, tokens_per_sample: int, break_mode: str) -> MonolingualDataset:
    sentences = [torch.randint(4, 54, (rng.randint(1, 20),)) for _ in range(rng.randint(1, 30))]
    for sentence in sentences:
        sentence[-1] = WORDS.eos()
    sizes = np.array([len(sentence) for sentence in sentences])
    corpus = TokenBlockDataset(
        sentences, sizes, tokens_per_sample, WORDS.pad(), WORDS.eos(), break_mode=break_mode, include_targets=True
    )
    return MonolingualDataset(corpus, corpus.sizes, WORDS, WORDS, shuffle=False, targets=["future"])


@pytest.mark.parametrize("break_mode", ["none", "complete"])
@pytest.mark.parametrize("seed", range(20))
def test_windows_equal_those_of_fairseq_in_one_process(seed: int, break_mode: str) -> None:
    rng = random.Random(seed)
    size, context = rng.randint(20, 30), rng.randint(1, 40)
    corpus = blocks(rng, size, break_mode)
    ours = ContextWindowDataset(corpus, size, context, WORDS.pad())
    theirs = LMContextWindowDataset(corpus, size, context, WORDS.pad())
    batch_size = rng.randint(1, 4)
    for start in range(0, len(corpus), batch_size):
        indices = range(start, min(start + batch_size, len(corpus)))
        expected = theirs.collater([theirs[index] for index in indices])
        got = ours.collater([ours[index] for index in indices])
        assert got["start_indices"] == expected["start_indices"]
        assert torch.equal(got["net_input"]["src_tokens"], expected["net_input"]["src_tokens"])
        assert torch.equal(got["net_input"]["src_lengths"], expected["net_input"]["src_lengths"])
        assert torch.equal(got["target"], expected["target"])


def test_a_window_does_not_depend_on_which_blocks_were_collated_before() -> None:
    corpus = blocks(random.Random(1), 20, "none")
    dataset = ContextWindowDataset(corpus, 20, 12, WORDS.pad())
    in_order = [dataset.collater([dataset[index]]) for index in range(len(corpus))]
    for index in reversed(range(len(corpus))):
        alone = dataset.collater([dataset[index]])
        assert torch.equal(alone["net_input"]["src_tokens"], in_order[index]["net_input"]["src_tokens"])


def test_every_target_is_scored_once_and_in_order() -> None:
    corpus = blocks(random.Random(2), 20, "none")
    dataset = ContextWindowDataset(corpus, 20, 7, WORDS.pad())
    scored = []
    for index in range(len(corpus)):
        batch = dataset.collater([dataset[index]])
        own = batch["target"][0, batch["start_indices"][0] :]
        scored.append(own[own != WORDS.pad()])
    assert torch.equal(torch.cat(scored), torch.cat([corpus[index]["target"] for index in range(len(corpus))]))


def test_the_language_modeling_task_uses_these_windows() -> None:
    assert language_modeling.LMContextWindowDataset is ContextWindowDataset


@pytest.mark.parametrize("mode", ["eos", "complete"])
def test_a_line_longer_than_the_positions_is_refused_and_not_left_out(mode: str, tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "data", {"train": ["a b c d e", "a b"], "test": ["a b c", "a b c d e", "b"]})
    flags = ("--sample-break-mode", mode, "--tokens-per-sample", "5")
    path = write_checkpoint(tmp_path / "five.pt", data, "vanilla_lm", *TINY, *flags)
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    task.load_dataset("test")
    sentence = (
        f"^--sample-break-mode {mode} needs lines of at most the model's 5 positions, .*: got a line of 6 tokens$"
    )
    with pytest.raises(ValueError, match=sentence):
        task.eval_lm_dataloader(task.dataset("test"), max_positions=models[0].max_positions())
