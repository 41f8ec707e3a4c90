"""What is replaced in fairseq: the whole list, and each of it once."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

import fairseq_ms
from fairseq_ms.host import errors, startup, trainer

TARGETS = {
    "fairseq.options.parse_args_and_arch",
    "fairseq.distributed.utils.call_main",
    "fairseq.distributed.utils._broadcast_object_slow",
    "fairseq.models.distributed_fairseq_model.DistributedDataParallel",
    "fairseq.checkpoint_utils.verify_checkpoint_directory",
    "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
    "fairseq.file_io.PathManager.copy",
    "fairseq.data.indexed_dataset.make_dataset",
    "fairseq.data.indexed_dataset._warmup_mmap_file",
    "fairseq.tasks.language_modeling.LanguageModelingTask.eval_lm_dataloader",
    "fairseq.tasks.fairseq_task.LegacyFairseqTask.build_model",
    "fairseq_cli.train.Trainer",
    "fairseq_cli.train.validate_and_save",
    "fairseq_cli.interactive.buffered_read",
    "fairseq_cli.interactive.make_batches",
}


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> list:
    """As in a process of fairseq-interactive, which replaces two more than others."""
    import fairseq_cli.interactive  # noqa: F401

    return startup.targets()


def test_sixteen_functions_at_most_are_replaced_in_fairseq_and_each_once(targets: list) -> None:
    names = [owner.__name__ if not isinstance(owner, type) else _path(owner) for owner, _, _ in targets]
    count = Counter(f"{owner}.{name}" for owner, (_, name, _) in zip(names, targets))
    assert count == dict.fromkeys(TARGETS, 1)
    assert len(TARGETS) <= 16


def _path(owner: type) -> str:
    return f"{owner.__module__}.{owner.__name__}"


def test_what_is_registered_again_is_replaced_no_further() -> None:
    fairseq_ms.register()
    for owner, name, around in startup.targets():
        found: Any = vars(owner)[name]
        found = found.__func__ if isinstance(found, staticmethod) else found
        if getattr(owner, "__name__", "") == "fairseq_cli.interactive":
            continue  # replaced only in its own process
        if around is trainer.Trainer:
            assert found is trainer.Trainer
        else:
            assert not hasattr(found.__wrapped__, "__wrapped__") or "fairseq_ms" not in found.__wrapped__.__module__
            assert found.__closure__ is not None
            assert around in [cell.cell_contents for cell in found.__closure__]
    assert sys.excepthook is errors.show
