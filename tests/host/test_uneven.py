"""What counts of an update in which a process has fewer batches than others; the sums are tested with processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_ms.host.uneven import _with_repeated_batches


class Task:
    def train_step(
        self, sample: dict, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad: bool = False
    ) -> tuple[torch.Tensor, int, dict]:
        return torch.tensor(0.0 if ignore_grad else 1.0), sample["size"], {"loss": sample["size"]}


def counted(samples: list[dict], by_name: bool) -> list[tuple[float, int, dict]]:
    trainer = SimpleNamespace(task=Task(), _dummy_batch={"size": 7})

    def step(trainer: Any, samples: list[dict]) -> list[tuple[float, int, dict]]:
        found = []
        for sample in samples:
            # fairseq's search for what is not a number names none of these.
            named = {"sample": sample, "model": 1, "criterion": 2, "optimizer": 3, "update_num": 4}
            step = trainer.task.train_step
            loss, size, logged = step(**named) if by_name else step(*named.values(), False)
            found.append((float(loss), size, logged))
        return found

    found = _with_repeated_batches(step, trainer, samples)
    assert "train_step" not in vars(trainer.task)
    return found


@pytest.mark.parametrize("by_name", [True, False])
def test_a_repeated_batch_counts_for_nothing_wherever_it_stands(by_name: bool) -> None:
    whole, nothing = (1.0, 10, {"loss": 10}), (0.0, 0, {"loss": 0})
    assert counted([{"size": 10}, {}], by_name) == [whole, nothing]
    assert counted([{}, {"size": 10}], by_name) == [nothing, whole]
    assert counted([{"size": 10}, {"size": 10}], by_name) == [whole, whole]
