"""``--add-bos-token``: every row begins with one symbol more, in training, evaluation, generation and analyses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.data import data_utils
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingTask

from fairseq_ms.cli import main
from fairseq_ms.errors import UsageError
from fairseq_ms.papers import sample_metrics as samples
from fairseq_ms.tools import checkpoints
from tests.helpers import trained
from tests.helpers.corpus import model_flags, random_flags
from tests.helpers.windows import block_lengths, naive_log_probs, scored_log_probs
from tests.registry import ARCHITECTURES, GENERATORS, POSITIONS, build, dictionary, setting

PLAIN = [
    arch
    for arch in ARCHITECTURES
    if setting(arch, "TASK", "language_modeling") == "language_modeling" and setting(arch, "HAS_LONGEST_TEXT", True)
]
WINDOW = 12


def learned(arch: str) -> dict[str, Any]:
    """Flags of a model that learns positions, and so has a longest text."""
    return {**random_flags(arch), **setting(arch, "LEARNED_POSITIONS", {})}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [line.replace("w", "word") for line in trained.random_lines(3, 12, words=18, length=7)]
    return trained.write_corpus(tmp_path_factory.mktemp("bos"), {"train": lines, "test": lines[:6], "valid": lines[6:]})


def setup(arch: str, data: Path, *flags: str) -> tuple[Any, Any, Any]:
    """Task, model and criterion as ``fairseq-train`` makes them."""
    given = [str(data), *model_flags(arch), "--tokens-per-sample", str(WINDOW), "--add-bos-token", *flags]
    given += ["--criterion", setting(arch, "CRITERION", "cross_entropy")] if "--criterion" not in flags else []
    cfg = trained.configuration("language_modeling", given)
    task = tasks.setup_task(cfg.task)
    torch.manual_seed(1)
    return task, task.build_model(cfg.model), task.build_criterion(cfg.criterion)


def corpus_tokens(data: Path, subset: str, words: Any) -> torch.Tensor:
    lines = data_utils.load_indexed_dataset(str(data / subset), words, None)
    return torch.cat([lines[index].long() for index in range(len(lines))])


def tables(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("arch", PLAIN)
def test_only_a_model_that_adds_bos_has_a_position_for_it(arch: str) -> None:
    flags, words = learned(arch), dictionary(9)
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
    with pytest.raises(UsageError, match=r"--max-target-positions 64: got 64 and --add-bos-token"):
        build(arch, flags, dictionary(9), POSITIONS)


# One token a chunk, so that a row has as many chunks as tokens, the last target included.
FIRST_PHASE = ("--criterion", "in_batch_sampled_softmax", "--segmentation", "fixed", "--max-segment-len", "1")


@pytest.mark.parametrize(
    ("arch", "flags"), [*((arch, ()) for arch in PLAIN), ("haed", FIRST_PHASE), ("hred", FIRST_PHASE)]
)
def test_full_rows_after_bos_train(arch: str, flags: tuple[str, ...], data: Path) -> None:
    task, model, criterion = setup(arch, data, *flags)
    task.load_dataset("train")
    batch = next(task.get_batch_iterator(task.dataset("train"), max_sentences=3).next_epoch_itr(shuffle=False))
    assert batch["net_input"]["src_tokens"].shape[1] == WINDOW + 1
    loss, size, _ = criterion(model.train(), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert size == batch["target"].ne(task.dictionary.pad()).sum()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("arch", PLAIN)
def test_evaluation_after_bos_is_that_of_single_rows(arch: str, context: int, data: Path) -> None:
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


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adding") / "model.pt"
    flags = ["--tokens-per-sample", str(WINDOW), "--add-bos-token"]
    return trained.write_checkpoint(path, data, "vanilla_lm", *trained.TINY, *flags)


def test_a_prompt_and_its_samples_fill_the_positions_after_bos(checkpoint: Path) -> None:
    loaded = checkpoints.load(str(checkpoint), cpu=True)
    samples.check_lengths(loaded, 4, WINDOW - 5)
    drawn = samples.sample(loaded, torch.full((2, 4), 5), WINDOW - 5, 3, 1.0, 2, seed=1)
    assert drawn.shape == (2, 2, WINDOW - 5)


def test_the_memory_command_counts_the_symbol_before_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--arch", "vanilla_lm", *trained.TINY, "--tokens-per-sample", "12", "--vocabulary", "40", "--cpu"]
    assert main(["memory", *flags, "--add-bos-token"]) == 0
    assert "1 x 13 tokens" in capsys.readouterr().out
    assert main(["memory", *flags]) == 0
    assert "1 x 12 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("arch", [arch for arch in GENERATORS if arch in PLAIN])
def test_generation_after_bos_goes_to_the_last_position(arch: str, beam: int) -> None:
    words = dictionary(9)
    model = build(arch, {**learned(arch), "init_std": 0.4, "add_bos_token": True}, words, 16).eval()
    generator = SequenceGenerator([model], words, beam_size=beam, max_len_b=16, min_len=15)
    prompt = torch.tensor([[words.bos(), 5, 6, 7]])
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([4])}}
    task = SimpleNamespace(source_dictionary=words, args=SimpleNamespace(add_bos_token=True))
    best = LanguageModelingTask.inference_step(task, generator, [model], sample)[0][0]
    assert best["tokens"][:3].tolist() == [5, 6, 7]
    row = torch.tensor([[words.bos(), *best["tokens"][:-1].tolist()]])
    assert row.size(1) == 16
    log_probs = model.get_normalized_probs(model(row), log_probs=True)[0]
    expected = log_probs.gather(1, best["tokens"][:, None])[:, 0]
    torch.testing.assert_close(best["positional_scores"], expected.detach(), rtol=1e-4, atol=1e-5)
