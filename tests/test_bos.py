"""``--add-bos-token``: every row begins with one symbol more, in training, evaluation, generation and analyses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options, tasks
from fairseq.data import data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_ms.analysis import checkpoints, scoring
from fairseq_ms.errors import UsageError
from tests.helpers import trained
from tests.helpers.cli import USER_DIR, run_cli
from tests.helpers.corpus import model_flags, random_flags, train_command
from tests.naive.windows import block_lengths, naive_log_probs, scored_log_probs
from tests.registry import ARCHITECTURES, GENERATORS, POSITIONS, build, dictionary, random_case, setting

PLAIN = [arch for arch in ARCHITECTURES if setting(arch, "TASK", "language_modeling") == "language_modeling"]
WINDOW = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [line.replace("w", "word") for line in trained.random_lines(3, 12, words=18, length=7)]
    return trained.write_corpus(tmp_path_factory.mktemp("bos"), {"train": lines, "test": lines[:6], "valid": lines[6:]})


def setup(arch: str, data: Path, *flags: str) -> tuple[Any, Any, Any]:
    """Task, model and criterion as ``fairseq-train`` makes them."""
    parser = options.get_training_parser(default_task="language_modeling")
    given = [str(data), *model_flags(arch), "--tokens-per-sample", str(WINDOW), "--add-bos-token", *flags]
    given += ["--criterion", setting(arch, "CRITERION", "cross_entropy")] if "--criterion" not in flags else []
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, given))
    task = tasks.setup_task(cfg.task)
    torch.manual_seed(1)
    return task, task.build_model(cfg.model), task.build_criterion(cfg.criterion)


def corpus_tokens(data: Path, subset: str, words: Any) -> torch.Tensor:
    lines = data_utils.load_indexed_dataset(str(data / subset), words, None)
    return torch.cat([lines[number].long() for number in range(len(lines))])


def tables(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("arch", PLAIN)
def test_only_a_model_that_adds_bos_has_a_position_for_it(arch: str) -> None:
    flags, words = random_flags(arch), dictionary(9)
    plain, longer = build(arch, flags, words, POSITIONS), build(arch, flags, words, POSITIONS + 1)
    adding = build(arch, {**flags, "add_bos_token": True}, words, POSITIONS)
    assert tables(adding) == tables(longer)
    assert plain.max_positions() == adding.max_positions() == POSITIONS
    given = {**flags, "add_bos_token": True, "max_target_positions": POSITIONS + 3}
    assert tables(build(arch, given, words, POSITIONS)) == tables(build(arch, flags, words, POSITIONS + 3))
    assert build(arch, given, words, POSITIONS).max_positions() == POSITIONS + 2


@pytest.mark.parametrize("arch", PLAIN)
def test_bos_counts_among_the_positions_that_are_given(arch: str) -> None:
    flags = {**random_flags(arch), "add_bos_token": True, "max_target_positions": POSITIONS}
    with pytest.raises(UsageError, match="--max-target-positions 64.*got 64 and --add-bos-token"):
        build(arch, flags, dictionary(9), POSITIONS)


@pytest.mark.parametrize("arch", PLAIN)
def test_full_rows_behind_bos_train(arch: str, data: Path) -> None:
    task, model, criterion = setup(arch, data)
    task.load_dataset("train")
    batch = next(task.get_batch_iterator(task.dataset("train"), max_sentences=3).next_epoch_itr(shuffle=False))
    assert batch["net_input"]["src_tokens"].shape[1] == WINDOW + 1
    loss, size, _ = criterion(model.train(), batch)
    loss.backward()
    assert size == batch["target"].ne(task.dictionary.pad()).sum()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("arch", ["haed", "hred"])
def test_the_first_phase_trains_on_full_rows_behind_bos(arch: str, data: Path) -> None:
    # One token a chunk, so that a row has as many chunks as tokens, the last target included.
    flags = ("--criterion", "in_batch_sampled_softmax", "--segmentation", "fixed", "--max-segment-len", "1")
    task, model, criterion = setup(arch, data, *flags)
    task.load_dataset("train")
    batch = next(task.get_batch_iterator(task.dataset("train"), max_sentences=3).next_epoch_itr(shuffle=False))
    loss, _, _ = criterion(model.train(), batch)
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("arch", PLAIN)
def test_evaluation_behind_bos_is_that_of_single_rows(arch: str, context: int, data: Path) -> None:
    task, model, _ = setup(arch, data)
    stride = WINDOW - context
    task.args.tokens_per_sample = stride
    task.load_dataset("test")
    model.eval()
    tokens = corpus_tokens(data, "test", task.dictionary)
    blocks = block_lengths([8] * 6, stride, "none")
    expected = naive_log_probs(model, tokens, blocks, stride, context, task.dictionary.bos())
    for batch_size in (1, 4):
        found = scored_log_probs(model, task, "test", context, True, batch_size=batch_size, num_workers=0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
