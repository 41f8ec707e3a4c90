"""A resumed run trains on what the uninterrupted one would have, in every epoch, whoever makes the batches."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from tests.helpers.cli import USER_DIR
from tests.helpers.forked import curve, train
from tests.helpers.trained import random_lines, write_corpus

EPOCHS = 3
STREAMS = ("--task", "streaming_language_modeling", "--tokens-per-sample", "3")
TASKS = {
    "blocks": ("--task", "language_modeling", "--tokens-per-sample", "7"),
    "lines": ("--task", "language_modeling", "--tokens-per-sample", "20", "--sample-break-mode", "eos"),
    "streams": STREAMS,
    "lines of a streaming model": (*STREAMS, "--sample-break-mode", "eos"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two parts of a corpus, of lines of 5 and of 6 words, with one dictionary."""
    words = ["w0 w1 w2 w3 w4", "w5 w6 w7 w8 w9"]
    parts = [random_lines(number, 9 - number, words=10, length=5 + number) for number in range(2)]
    folder = tmp_path_factory.mktemp("corpus")
    return [
        write_corpus(folder / str(number), {"train": [*lines, *words], "valid": words})
        for number, lines in enumerate(parts)
    ]


@functools.cache
def config(data: str, flags: tuple[str, ...]) -> Any:
    """fairseq's configuration of a training command."""
    parser = options.get_training_parser(default_task="language_modeling")
    arguments = [data, "--arch", "transformer_lm", "--batch-size", "2", "--required-batch-size-multiple", "1", *flags]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))


class Run:
    """The process of one rank, as far as it asks for batches."""

    def __init__(self, folders: list[Path], flags: tuple[str, ...], rank: int = 0, ranks: int = 1) -> None:
        self.cfg = config(":".join(str(folder) for folder in folders), flags)
        self.task = tasks.setup_task(self.cfg.task)
        decoder = SimpleNamespace(segment_len=3, memory_reach=lambda: 2)
        model = SimpleNamespace(decoder=decoder, max_positions=lambda: 20)
        self.task.model = model
        self.trainer = SimpleNamespace(
            task=self.task,
            cfg=self.cfg,
            model=model,
            tpu=False,
            data_parallel_world_size=ranks,
            data_parallel_rank=rank,
            reset_dummy_batch=lambda batch: None,
        )

    def batches(self, state: dict[str, Any] | None = None) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """What fairseq-train does with its iterators: epoch, batch and what a checkpoint behind it would hold."""
        sharded = {"disable_iterator_cache": self.task.has_sharded_data("train")}
        get = Trainer.get_train_iterator
        epoch = state["epoch"] if state else 1
        iterator = get(self.trainer, epoch=epoch, load_dataset=True, **sharded)
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
                iterator = get(self.trainer, epoch, load_dataset=sharded["disable_iterator_cache"], **sharded)


def equal(one: Any, other: Any) -> bool:
    """Whether two batches are the same, whatever they are made of."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def assert_resumes_anywhere(folders: list[Path], flags: tuple[str, ...], rank: int = 0, ranks: int = 1) -> list:
    """Compare a run with one that is resumed behind the second batch of every epoch and behind its last.

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
        assert not wrong, f"resumed behind batch {place + 1}, these of {len(rest)} batches are others: {wrong}"
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
            seen = [int(number) for at, batch in batches if at == epoch for number in batch["id"]]
            assert sorted(seen) == list(range(len(dataset))), "a sample is seen twice or never"
        assert targets_of(batches, epoch) == tokens


@pytest.mark.parametrize("kind", TASKS)
def test_two_ranks_resume_with_their_own_batches_and_share_every_sample(kind: str, folders: list[Path]) -> None:
    flags = (*TASKS[kind], "--num-workers", "0")
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
    assert_resumes_anywhere(folders[:1], (*TASKS["blocks"], "--num-workers", "0", *flags), rank=1, ranks=2)


TINY = ("--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "12", "--decoder-attention-heads", "2")
RETINA = (*TINY, "--decoder-layers", "2", "--scale-windows", "1x=0:4,2x=4:12", "--scale-heads", "1x=1,2x=1")
TRANSFORMER_XL = ("--task", "streaming_language_modeling", "--arch", "transformer_xl", *TINY, "--decoder-layers", "2")
HAED = ("--encoder", "mlp", "--main", "transformer", "--decoder", "lstm", "--segmentation", "fixed")
KILLED = {
    # flags, parts of the corpus, processes
    "retina_lm, two data workers": (("--arch", "retina_lm", *RETINA, "--num-workers", "2"), 1, 1),
    "transformer_xl, sharded data": ((*TRANSFORMER_XL, "--tokens-per-sample", "3", "--mem-len", "5"), 2, 1),
    "haed": (("--arch", "haed", *HAED, "--max-segment-len", "3", "--update-freq", "2"), 1, 1),
    "fairseq's transformer_lm, sharded data": (("--arch", "transformer_lm", *TINY, "--num-workers", "1"), 2, 1),
    "retina_lm, two processes": (("--arch", "retina_lm", *RETINA), 1, 2),
    "transformer_xl, two processes": ((*TRANSFORMER_XL, "--tokens-per-sample", "3", "--mem-len", "5"), 1, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KILLED)
def test_a_training_killed_in_every_epoch_ends_as_if_nothing_had_happened(
    case: str, folders: list[Path], tmp_path: Path
) -> None:
    """Four times kill -9, at random updates of epochs 1, 2 and 3: bit-identical losses and weights."""
    flags, parts, ranks = KILLED[case]
    rng = random.Random(case)

    def command(name: str) -> list[str]:
        return [
            *("fairseq-train", ":".join(str(folder) for folder in folders[:parts]), "--user-dir", str(USER_DIR)),
            *("--cpu", "--task", "language_modeling", "--tokens-per-sample", "5"),
            *("--batch-size", "2", "--required-batch-size-multiple", "1"),
            *("--num-workers", "0", "--dropout", "0.1", "--optimizer", "adam", "--lr", "0.002", "--clip-norm", "1.0"),
            *("--max-epoch", str(EPOCHS), "--save-interval-updates", "2", "--no-epoch-checkpoints"),
            *("--log-format", "json", "--log-interval", "1", "--save-dir", str(tmp_path / name), *flags),
        ]

    train(command("whole"), tmp_path / "whole.log", ranks)
    expected = curve(tmp_path / "whole.log")
    ends = sorted(int(step) for kind, step in expected if kind == "train")
    assert len(ends) == EPOCHS
    assert ends[0] >= 3, "an epoch is too short to be killed in its middle"
    kills = [rng.randint(start + 1, end) for start, end in zip([0, *ends], ends)]
    kills = sorted([*kills, rng.choice([update for update in range(1, ends[-1]) if update not in kills])])
    printed = {}
    for number, update in enumerate([*kills, None]):
        log = tmp_path / f"{number}.log"
        train(command("killed"), log, ranks, (update, rng.random() < 0.5) if update is not None else None)
        again = curve(log)
        assert all(expected[place] == record for place, record in again.items()), f"killed at {kills}, start {number}"
        printed |= again
    assert printed == expected
    first, second = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True) for name in ("whole", "killed")
    )
    assert equal(first["model"], second["model"])
    assert equal(first["last_optimizer_state"], second["last_optimizer_state"])
