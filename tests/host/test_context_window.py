"""Strided evaluation: every target once, in the window fairseq would give it, whoever makes the batches."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.data import LMContextWindowDataset, MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.tasks import language_modeling

from fairseq_ms.errors import UsageError
from fairseq_ms.host.context_window import ContextWindowDataset
from tests.helpers import trained
from tests.helpers.windows import block_lengths, naive_log_probs, scored_log_probs
from tests.registry import build, dictionary

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


@pytest.mark.parametrize("break_mode", ["none", "complete", "eos"])
@pytest.mark.parametrize("seed", range(20))
def test_windows_equal_those_of_fairseq_in_one_process(seed: int, break_mode: str) -> None:
    rng = random.Random(seed)
    # Lines have up to 20 tokens, so some of them are longer than a block.
    size, context = rng.randint(5, 30), rng.randint(1, 40)
    corpus = blocks(rng, size, break_mode)
    ours = ContextWindowDataset(corpus, size, context, WORDS.pad())
    theirs = LMContextWindowDataset(corpus, size, context, WORDS.pad())
    batch_size = rng.randint(1, 4)
    for start in range(0, len(corpus), batch_size):
        indices = range(start, min(start + batch_size, len(corpus)))
        expected = theirs.collater([theirs[index] for index in indices])
        got = ours.collater([ours[index] for index in indices])
        assert got["start_indices"] == expected["start_indices"]
        # fairseq pads every row by the context; here the longest row has no padding.
        longest = int(got["net_input"]["src_lengths"].max())
        assert torch.equal(got["net_input"]["src_tokens"], expected["net_input"]["src_tokens"][:, :longest])
        assert torch.equal(got["net_input"]["src_lengths"], expected["net_input"]["src_lengths"])
        assert torch.equal(got["target"], expected["target"][:, :longest])
        assert expected["target"][:, longest:].eq(WORDS.pad()).all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of 1 to 15 tokens, their ends included."""
    lengths = [3, 14, 1, 9, 0, 13]
    lines = [" ".join(line.split()[:count]) for line, count in zip(trained.random_lines(4, 6, length=14), lengths)]
    return trained.write_corpus(tmp_path_factory.mktemp("lines"), {"train": lines, "test": lines})


def task_of(data: Path, stride: int, break_mode: str) -> Any:
    flags = ["--arch", "vanilla_lm", "--tokens-per-sample", stride, "--sample-break-mode", break_mode]
    cfg = trained.configuration("language_modeling", [data, *flags])
    task = language_modeling.LanguageModelingTask.setup_task(cfg.task)
    task.load_dataset("test")
    return task


# Nothing begins or ends there that does not elsewhere.
MIDDLE = [pytest.param(12, 4, marks=pytest.mark.slow), pytest.param(8, 8, marks=pytest.mark.slow)]
SMALL = {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 8, "decoder_attention_heads": 2, "decoder_layers": 2}


@pytest.mark.parametrize("break_mode", ["none", "complete", "eos"])
@pytest.mark.parametrize(("stride", "context"), [(16, 0), (15, 1), *MIDDLE, (3, 13), (1, 15)])
def test_every_token_is_scored_once_whatever_stride_break_mode_batches_and_workers(
    stride: int, context: int, break_mode: str, data: Path
) -> None:
    task = task_of(data, stride, break_mode)
    model = build("vanilla_lm", {**SMALL, "init_std": 0.4}, task.dictionary, positions=16).eval()
    lines = data_utils.load_indexed_dataset(str(data / "test"), task.dictionary, None)
    lengths = [lines[index].numel() for index in range(len(lines))]
    tokens = torch.cat([lines[index].long() for index in range(len(lines))])
    blocks = block_lengths(lengths, stride, break_mode)
    expected = naive_log_probs(model, tokens, blocks, stride, context, bos=None)
    assert expected.numel() == sum(lengths)
    workers = 2 if stride == 12 else 0
    for settings in ({"batch_size": 1, "num_workers": 0}, {"max_tokens": 40, "num_workers": workers}):
        found = scored_log_probs(model, task, "test", context, False, **settings)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_line_longer_than_the_positions_is_refused_and_not_left_out(data: Path) -> None:
    for context in (0, 5):
        task = task_of(data, 12 - context, "eos")
        with pytest.raises(
            UsageError, match=r"^--sample-break-mode eos needs .* 12 positions.*: got a line of 15 tokens$"
        ):
            task.eval_lm_dataloader(task.dataset("test"), max_positions=12, context_window=context)
    with pytest.raises(UsageError, match=r"^--context-window must be at least 0: got -1$"):
        task.eval_lm_dataloader(task.dataset("test"), context_window=-1)
