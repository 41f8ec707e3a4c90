"""Every token is a target once an epoch, in every command, however it is put into batches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq_cli import generate, train, validate
from omegaconf import OmegaConf

from fairseq_ms.errors import UsageError
from fairseq_ms.host import checkpoints
from tests.helpers.cli import USER_DIR
from tests.helpers.forked import run
from tests.helpers.resumed import assert_same_weights, equal
from tests.helpers.trained import TINY, configuration, random_lines, write_checkpoint, write_corpus
from tests.host.test_resuming import Run, targets_of

TASKS = ("language_modeling", "language_modeling_random_offsets")
STREAMS = "streaming_language_modeling"
SIZES = (1, 4, 7)
LIMIT = 45  # of --max-tokens, in tokens: six rows and a half
LINES = {"train": 29, "valid": 13, "test": 11}
LENGTH = 7  # of a row; most lines have eight tokens
ROWS = ("--tokens-per-sample", str(LENGTH))
MODEL = ("--arch", "vanilla_lm", "--positions", "rotary", *TINY, *ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of which no number of rows or lines comes out even, and a model."""
    folder = tmp_path_factory.mktemp("batches")
    splits = {split: random_lines(count, count, words=9, length=7) for split, count in LINES.items()}
    splits = {split: [*lines, "w0 w1 w2"] for split, lines in splits.items()}
    write_corpus(folder / "data", splits)
    write_checkpoint(folder / "model.pt", folder / "data", *MODEL[1:])
    return folder


@functools.cache
def parsed(task: str, folder: Path, *flags: str) -> Any:
    model = MODEL if task in TASKS else ("--arch", "transformer_xl", "--mem-len", "5", *TINY, *ROWS)
    arguments = [folder / "data", *model, "--task", task, "--optimizer", "adam", "--max-epoch", 1, "--batch-size", 4]
    arguments += ["--no-save", "--save-dir", folder / "none", "--cpu", "--num-workers", 0, "--log-format", "none"]
    return configuration(task, [*arguments, *flags])


def configured(task: str, folder: Path, *flags: str, **changes: Any) -> Any:
    """The configuration of a command of one epoch; ``changes`` name settings with "__" for a dot."""
    cfg = OmegaConf.create(OmegaConf.to_container(parsed(task, folder, *flags)))
    given = {"common_eval__path": str(folder / "model.pt"), "dataset__gen_subset": "test", **changes}
    for name, value in {**given, "generation__beam": 1, "generation__max_len_b": 9}.items():
        OmegaConf.update(cfg, name.replace("__", "."), value)
    return cfg


def limits() -> Iterator[dict[str, Any]]:
    """All limits of a batch: rows, tokens, and both."""
    for size in (*SIZES, None):
        for most in (None, LIMIT) if size else (LIMIT,):
            names = {"dataset__batch_size": size, "dataset__max_tokens": most}
            yield {**names, **{f"{name}_valid": value for name, value in names.items()}}


def corpus(folder: Path, split: str) -> list[int]:
    """All targets of a split, sorted."""
    task = LanguageModelingTask.setup_task(parsed("language_modeling", folder).task)
    task.load_dataset(split)
    blocks = task.dataset(split)
    return sorted(int(token) for row in range(len(blocks)) for token in blocks[row]["target"])


class Noted:
    """All batches that a task is shown by the name of its method."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.batches: dict[str, list[dict[str, Any]]] = {}
        for owner, name in (
            (FairseqTask, "train_step"),
            (FairseqTask, "valid_step"),
            (LanguageModelingTask, "inference_step"),
        ):
            patch.setattr(owner, name, self._noting(getattr(owner, name), self.batches.setdefault(name, [])))

    def _noting(self, step: Any, batches: list[dict[str, Any]]) -> Any:
        def noting(*args: Any, **settings: Any) -> Any:
            batches.extend(part for part in (*args, *settings.values()) if isinstance(part, dict) and part)
            return step(*args, **settings)

        return noting

    def targets(self, name: str) -> list[int]:
        """Sorted, of all batches since this was last asked."""
        found, self.batches[name][:] = targets_of([(1, batch) for batch in self.batches[name]], 1), []
        return found


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch)


@pytest.mark.parametrize("command", [train, validate, generate], ids=["train", "validate", "generate"])
@pytest.mark.parametrize("task", TASKS)
def test_every_command_shows_every_token_once(task: str, command: Any, folder: Path, noted: Noted) -> None:
    shown = {train: ("train_step", "valid_step"), validate: ("valid_step",), generate: ("inference_step",)}[command]
    split_of = {"train_step": "train", "valid_step": "valid", "inference_step": "test"}
    expected = {name: corpus(folder, split_of[name]) for name in shown}
    mode = "eos" if command is generate else "none"
    for changes in limits():
        command.main(configured(task, folder, task__sample_break_mode=mode, **changes))
        assert {name: noted.targets(name) for name in shown} == expected, changes


@pytest.mark.parametrize(("task", "ranks"), [*zip(TASKS, (2, 3))])
def test_several_processes_and_shards_share_every_token(
    task: str, ranks: int, folder: Path, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {split: corpus(folder, split) for split in LINES}
    monkeypatch.setattr(distributed_utils, "get_data_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(distributed_utils, "get_data_parallel_group", lambda: None)
    monkeypatch.setattr(distributed_utils, "all_gather_list", lambda logged, **unused: [logged])
    # A shard of fairseq-generate needs a batch.
    for changes in (*list(limits())[:4], {"dataset__grouped_shuffling": True}):
        seen: dict[str, list[Any]] = {"train": [], "valid": []}
        for rank in range(ranks):
            own = {**changes, "distributed_training__distributed_world_size": ranks}
            cfg = configured(task, folder, **own, distributed_training__distributed_rank=rank)
            trainer = Run.__new__(Run).begin(cfg, rank, ranks)
            seen["train"] += trainer.get_train_iterator(1).next_epoch_itr()
            trainer.task.load_dataset("valid")
            seen["valid"] += trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False)
            monkeypatch.setattr(distributed_utils, "get_data_parallel_rank", lambda rank=rank: rank)
            validate.main(cfg)
            cfg.task.sample_break_mode = "eos"
            generate.main(cfg)
        for split, batches in seen.items():
            assert targets_of([(1, batch) for batch in batches], 1) == expected[split], (split, changes)
        assert noted.targets("valid_step") == expected["valid"], changes
        assert noted.targets("inference_step") == expected["test"], changes


def test_a_users_own_multiple_is_obeyed_and_says_what_it_leaves_out(
    folder: Path, noted: Noted, caplog: pytest.LogCaptureFixture
) -> None:
    """34 rows of training: with batches of four, fairseq's multiple of 8 leaves out the last two."""
    flag = "--required-batch-size-multiple"
    with caplog.at_level(logging.WARNING):
        train.main(configured(TASKS[0], folder, flag, "8"))
    assert sum(len(batch["id"]) for batch in noted.batches["train_step"]) == 32
    assert [message for message in caplog.messages if flag in message and "2 of 34 rows" in message]
    for multiple in (16, 0):
        changes = {"dataset__required_batch_size_multiple": multiple, "task__sample_break_mode": "eos"}
        with pytest.raises(UsageError, match=f"^{flag} must .*: got {multiple}$"):
            generate.main(configured(TASKS[0], folder, **changes, dataset__batch_size=16))


def test_under_hydra_fairseqs_eight_is_nobodys_own(folder: Path, noted: Noted) -> None:
    """It is composed before this package is read; another number is the user's."""
    hydra = {"job_logging_cfg": {"version": 1, "incremental": True}}
    train.main(configured(TASKS[0], folder, **hydra, dataset__required_batch_size_multiple=8))
    assert noted.targets("train_step") == corpus(folder, "train")
    train.main(configured(TASKS[0], folder, **hydra, dataset__required_batch_size_multiple=16))
    assert len(noted.targets("train_step")) == len(corpus(folder, "train")) - 2 * LENGTH


@pytest.mark.parametrize("task", [*TASKS, STREAMS])
def test_an_epoch_goes_on_with_the_multiple_that_it_began_with(
    task: str, folder: Path, noted: Noted, tmp_path: Path
) -> None:
    """A checkpoint of a version with fairseq's 8, resumed and resumed again; the next epoch has every row."""

    def trained(name: str, multiple: int, updates: int = 0, epochs: int = 2) -> list[dict[str, Any]]:
        changes = {"dataset__required_batch_size_multiple": multiple, "optimization__max_update": updates}
        changes |= {"optimization__max_epoch": epochs, "checkpoint__no_save": False}
        train.main(configured(task, folder, checkpoint__save_dir=str(tmp_path / name), **changes))
        found, noted.batches["train_step"][:] = noted.batches["train_step"][:], []
        return found

    first, whole = trained("first", 8, epochs=1), trained("whole", 1)
    epoch = len(whole) // 2
    assert (len(first), epoch) in {(8, 9), (9, 9)}
    trained("resumed", 8, updates=3)
    path = tmp_path / "resumed" / "checkpoint_last.pt"
    state = torch.load(path, weights_only=True)
    del state["extra_state"][checkpoints.MULTIPLE]
    torch.save(state, path)
    rest = [*trained("resumed", 1, updates=5), *trained("resumed", 1)]
    expected = [*first[3:], *whole[-epoch:]]
    assert [equal(*pair) for pair in zip(rest, expected, strict=True)] == [True] * len(expected)
    if task not in TASKS:
        assert_same_weights(tmp_path / "whole", tmp_path / "resumed")


NO_ROWS = "--sample-break-mode must be eos for fairseq-generate"
GROUPS = ("--sample-break-mode", "eos", "--diverse-beam-groups", "2")


@pytest.mark.parametrize(
    ("task", "more", "sentence"),
    [
        *((task, (), NO_ROWS) for task in TASKS),
        (STREAMS, ("--prefix-size", "1"), NO_ROWS),
        ("language_modeling", GROUPS, "--diverse-beam-groups must be left out of fairseq-generate"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_is_read(
    task: str, more: tuple[str, ...], sentence: str, folder: Path, tmp_path: Path
) -> None:
    """Blocks can be begun anew from a prefix, and streams cannot."""
    command = ["fairseq-generate", folder / "data", "--user-dir", USER_DIR, "--task", task, "--path", "none.pt", *more]
    assert run([*command, "--results-path", tmp_path / "results"], tmp_path / "log") == [1]
    printed = (tmp_path / "log").read_text()
    assert f"error: {sentence}" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "results").exists()
