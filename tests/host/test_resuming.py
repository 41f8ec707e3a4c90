"""A resumed run trains on what the uninterrupted one would have, in every epoch, whoever makes the batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.data import MonolingualDataset
from fairseq.logging import metrics
from fairseq.trainer import Trainer as FairseqTrainer

from fairseq_ms.host import trainer as host_trainer
from fairseq_ms.host.trainer import Trainer
from tests.helpers.forked import curve, train
from tests.helpers.resumed import HAED, RETINA, TRANSFORMER_XL, assert_same_weights, equal, tiny_training, write_parts
from tests.helpers.trained import configuration

EPOCHS = 3
IN_PROCESS = ("--num-workers", "0")
STREAMS = ("--task", "streaming_language_modeling", "--tokens-per-sample", "3")
TASKS = {
    "blocks": ("--task", "language_modeling", "--tokens-per-sample", "7"),
    "blocks at random offsets": ("--task", "language_modeling_random_offsets", "--tokens-per-sample", "7"),
    "lines": ("--task", "language_modeling", "--tokens-per-sample", "20", "--sample-break-mode", "eos"),
    "streams": STREAMS,
    "lines of a streaming model": (*STREAMS, "--sample-break-mode", "eos"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_parts(tmp_path_factory.mktemp("corpus"))


@functools.cache
def config(data: str, flags: tuple[str, ...]) -> Any:
    """fairseq's configuration of a training command."""
    arguments = [data, "--arch", "transformer_lm", "--batch-size", "2", *flags]
    return configuration("language_modeling", arguments)


class Run(Trainer):
    """The trainer of one rank, as far as it asks for batches."""

    data_parallel_world_size = data_parallel_rank = 0  # which are properties

    def __init__(self, folders: list[Path], flags: tuple[str, ...], rank: int = 0, ranks: int = 1) -> None:
        self.begin(config(":".join(str(folder) for folder in folders), flags), rank, ranks)

    def begin(self, cfg: Any, rank: int, ranks: int) -> Run:
        """What a trainer of this configuration has."""
        self.cfg, self.task = cfg, tasks.setup_task(cfg.task)
        core = SimpleNamespace(segment_len=3, memory_reach=lambda: 2)
        model = SimpleNamespace(decoder=SimpleNamespace(core=core), memory_flags=dict, max_positions=lambda: 20)
        self.task.model = self._wrapped_model = self._model = model
        self.data_parallel_world_size, self.data_parallel_rank = ranks, rank
        self.tpu, self.leaving, self.expected, self.began, self.multiple = False, None, {}, {}, None
        self.finished, self.valid_tokens, self.expected_batches = None, None, {}
        return self

    def batches(self, state: dict[str, Any] | None = None) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """What fairseq-train does with its iterators: epoch, batch and what a checkpoint after it would hold."""
        sharded = {"disable_iterator_cache": self.task.has_sharded_data("train")}
        epoch = state["epoch"] if state else 1
        iterator = self.get_train_iterator(epoch=epoch, load_dataset=True, **sharded)
        if state:
            iterator.load_state_dict(state)
        while epoch <= EPOCHS:
            batches = iterator.next_epoch_itr(
                shuffle=iterator.next_epoch_idx > self.cfg.dataset.curriculum,
                fix_batches_to_gpus=self.cfg.distributed_training.fix_batches_to_gpus,
            )
            for batch in batches:
                yield iterator.epoch, batch, iterator.state_dict()
            epoch = iterator.next_epoch_idx
            if sharded["disable_iterator_cache"] or epoch > EPOCHS:
                # Workers that only the garbage collector finds are waited for, five seconds each.
                del batches
                iterator._cur_epoch_itr = iterator.dataloader = None
            if epoch <= EPOCHS:
                iterator = self.get_train_iterator(epoch, load_dataset=sharded["disable_iterator_cache"], **sharded)


def assert_resumes_anywhere(folders: list[Path], flags: tuple[str, ...], rank: int = 0, ranks: int = 1) -> list:
    """Compare a run with one that is resumed after the second batch of every epoch and after its last.

    Returns (epoch, batch) of the whole run.
    """
    whole = list(Run(folders, flags, rank, ranks).batches())
    ends = [place for place in range(len(whole) - 1) if whole[place][0] != whole[place + 1][0]]
    starts = [0, *(end + 1 for end in ends)]
    assert len(starts) == EPOCHS
    for place in sorted({*ends, *(start + 1 for start in starts)}):
        rest = list(Run(folders, flags, rank, ranks).batches(whole[place][2]))
        expected = whole[place + 1 :]
        assert [epoch for epoch, _, _ in rest] == [epoch for epoch, _, _ in expected]
        wrong = [at for at, (one, other) in enumerate(zip(rest, expected)) if not equal(one[1], other[1])]
        assert not wrong, f"resumed after batch {place + 1}, these of {len(rest)} batches are others: {wrong}"
    return [(epoch, batch) for epoch, batch, _ in whole]


def targets_of(batches: list, epoch: int) -> list[int]:
    """All targets of an epoch, sorted."""
    targets = [batch["target"].flatten() for at, batch in batches if at == epoch and batch]
    return sorted(token for token in torch.cat(targets).tolist() if token != 1)


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", TASKS)
def test_a_resumed_run_has_the_batches_of_the_uninterrupted_one(
    kind: str, parts: int, workers: str, folders: list[Path]
) -> None:
    flags = (*TASKS[kind], "--num-workers", workers)
    batches = assert_resumes_anywhere(folders[:parts], flags)
    for epoch in range(1, EPOCHS + 1):
        run = Run(folders[:parts], flags)
        run.task.load_dataset("train", epoch=epoch)
        dataset = run.task.dataset("train")
        if kind == "streams":
            tokens = sorted(int(token) for line in dataset.sentences for token in line)
        else:
            tokens = sorted(int(token) for sample in range(len(dataset)) for token in dataset[sample]["target"])
            seen = sorted(int(index) for at, batch in batches if at == epoch for index in batch["id"])
            assert seen == list(range(len(seen))), "a sample is seen twice or never"
            assert len(seen) - len(dataset) in ({0, 1} if kind == "blocks at random offsets" else {0})
        assert targets_of(batches, epoch) == tokens


@pytest.mark.parametrize("kind", TASKS)
def test_two_ranks_resume_with_their_own_batches_and_share_every_sample(kind: str, folders: list[Path]) -> None:
    flags = (*TASKS[kind], *IN_PROCESS)
    ranks = [assert_resumes_anywhere(folders[:1], flags, rank, 2) for rank in range(2)]
    alone = [(epoch, batch) for epoch, batch, _ in Run(folders[:1], flags).batches()]
    for epoch in range(1, EPOCHS + 1):
        together = [*targets_of(ranks[0], epoch), *targets_of(ranks[1], epoch)]
        assert sorted(together) == targets_of(alone, epoch)


@pytest.mark.parametrize(
    "flags",
    [
        ("--grouped-shuffling",),
        ("--update-epoch-batch-itr", "True"),
        ("--update-ordered-indices-seed",),
        ("--update-ordered-indices-seed", "--grouped-shuffling"),
        ("--curriculum", "1"),
        ("--skip-remainder-batch",),
        ("--data-buffer-size", "2", "--num-workers", "1"),
    ],
    ids=" ".join,
)
def test_flags_that_change_the_order_are_resumed_with(flags: tuple[str, ...], folders: list[Path]) -> None:
    assert_resumes_anywhere(folders[:1], (*TASKS["blocks"], *IN_PROCESS, *flags), rank=1, ranks=2)


@pytest.mark.parametrize("workers", ["0", "2", "2 --data-buffer-size 0"])
def test_a_dataset_that_changes_with_the_epoch_is_read_in_the_current_one(
    workers: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def collater(self, samples):
        return {**collate(self, samples), "epoch": self.epoch}

    collate = MonolingualDataset.collater
    monkeypatch.setattr(MonolingualDataset, "collater", collater)
    monkeypatch.setattr(MonolingualDataset, "set_epoch", lambda self, epoch: setattr(self, "epoch", epoch))
    for parts in (1, 2):
        batches = assert_resumes_anywhere(folders[:parts], (*TASKS["blocks"], "--num-workers", *workers.split()))
        assert all(batch["epoch"] == epoch for epoch, batch in batches)


def test_batches_that_stay_on_their_rank_stay_there_after_a_resume(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MonolingualDataset, "supports_prefetch", True)
    monkeypatch.setattr(MonolingualDataset, "prefetch", lambda self, indices: None)
    flags = (*TASKS["blocks"], *IN_PROCESS, "--fix-batches-to-gpus", "--batch-size", "1")
    batches = assert_resumes_anywhere(folders[:1], flags, rank=1, ranks=2)
    assert targets_of(batches, 1) == targets_of(batches, 2) == targets_of(batches, 3)


def test_curriculum_ends_when_its_epochs_are_over(folders: list[Path]) -> None:
    run = Run(folders[:1], (*TASKS["blocks"], *IN_PROCESS, "--curriculum", "1"))
    ids: dict[int, list[list[int]]] = {1: [], 2: [], 3: []}
    for epoch, batch, _ in run.batches():
        ids[epoch].append(batch["id"].tolist())
    iterator = Run(folders[:1], (*TASKS["blocks"], *IN_PROCESS)).get_train_iterator(1)
    assert ids[1] == [list(batch) for batch in iterator.frozen_batches], "the first epoch is shuffled"
    assert ids[2] != ids[1], "the second epoch is in the order of the first"
    assert ids[3] != ids[2]


def test_the_order_of_an_uninterrupted_run_is_fairseqs_own(folders: list[Path]) -> None:
    for flags in ((), ("--update-ordered-indices-seed",), ("--grouped-shuffling",)):
        ours = [batch for _, batch, _ in Run(folders[:1], (*TASKS["blocks"], *IN_PROCESS, *flags)).batches()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "get_train_iterator", FairseqTrainer.get_train_iterator)
            run = Run(folders[:1], (*TASKS["blocks"], *IN_PROCESS, *flags))
            theirs = [batch for _, batch, _ in run.batches()]
        assert equal(dict(enumerate(ours)), dict(enumerate(theirs)))


MUON = ("--optimizer", "muon", "--lr", "0.02", "--adam-lr", "0.002", "--lr-scheduler", "inverse_sqrt")
STREAMED = (*TRANSFORMER_XL, "--tokens-per-sample", "3", "--mem-len", "5")
FIRST_PHASE = (*HAED, "--max-segment-len", "3", "--criterion", "in_batch_sampled_softmax")
RESUMED = {
    # flags, parts of the corpus, processes
    "retina_lm, two data workers": (("--arch", "retina_lm", *RETINA, "--num-workers", "2"), 1, 1),
    "transformer_xl, sharded data": (STREAMED, 2, 1),
    "haed": (("--arch", "haed", *HAED, "--max-segment-len", "3", "--update-freq", "2"), 1, 1),
    "haed, first phase": (("--arch", "haed", *FIRST_PHASE), 1, 1),
    "transformer_xl, Muon, bf16, two processes": ((*STREAMED, *MUON, "--bf16"), 1, 2),
}


def command(case: str, folders: list[Path], save_dir: Path, *more: str) -> list[str]:
    """A ``fairseq-train`` of a tiny model that prints every update unless told otherwise."""
    flags, parts, _ = RESUMED[case]
    return tiny_training(folders[:parts], save_dir, *flags, *more)


QUICK = ("retina_lm, two data workers", "transformer_xl, Muon, bf16, two processes")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in RESUMED]
)
def test_the_same_command_with_a_later_end_prints_the_same_losses(
    case: str, folders: list[Path], tmp_path: Path
) -> None:
    """A run that is resumed after epoch 1, and again inside epoch 2; what is printed is the mean of two updates."""
    more, ranks = ("--log-interval", "2"), RESUMED[case][2]
    train(command(case, folders, tmp_path / "whole", *more, "--max-epoch", "2"), tmp_path / "whole.log", ranks)
    expected = curve(tmp_path / "whole.log")
    first = min(int(step) for kind, step in expected if kind == "train")
    printed: dict[tuple[str, str], dict[str, str]] = {}
    for end in (("--max-epoch", "1"), ("--max-update", str(first + 3)), ("--max-epoch", "2")):
        log = tmp_path / f"{end[1]}{end[0]}.log"
        train(command(case, folders, tmp_path / "resumed", *more, *end), log, ranks)
        printed |= curve(log)
    assert {place: printed[place] for place in expected} == expected
    assert_same_weights(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.parametrize("place", [0, 3])
def test_times_of_another_process_end_with_it_between_epochs_and_within(place: int) -> None:
    """fairseq means to reset them within an epoch, and does so for none."""
    metrics.reset()
    with metrics.aggregate("train"):
        metrics.log_speed("ups", 1)
        metrics.log_speed("ups", 1)
        metrics.log_scalar("loss", 2.0)
    saved = {"train_iterator": {"version": 2, "iterations_in_epoch": place}, "metrics": metrics.state_dict()}

    metrics.reset()
    if place:
        metrics.load_state_dict(saved["metrics"])
    host_trainer._restore_meters(saved)
    assert metrics.get_meter("default", "ups").n == 0
    assert metrics.get_meter("default", "loss").sum == 2.0
