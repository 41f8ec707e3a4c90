"""``fairseq-train`` in processes that train together, and what they log, in double precision."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.optim import FairseqOptimizer
from fairseq.trainer import Trainer
from fairseq_cli.train import main
from omegaconf import DictConfig, OmegaConf

import fairseq_ms.models  # noqa: F401  (registers everything)
from tests.helpers.forked import context, ended, print_to, rank_log

Curve = list[dict[str, float]]
"""Of every update its loss, its gradient's norm and the like; of every validation the sum of losses, and of what."""


def curves(configurations: Sequence[DictConfig], settings: Sequence[dict], ranks: int, log: Path) -> list[Curve]:
    """Train one after the other, each in the same ``ranks`` processes, which must all log the same.

    ``settings`` are those that differ from a configuration's, by their names with dots.
    """
    jobs = []
    for cfg, changes in zip(configurations, settings, strict=True):
        job = OmegaConf.create(OmegaConf.to_container(cfg))
        OmegaConf.set_struct(job, False)
        for name, value in changes.items():
            OmegaConf.update(job, name, value)
        if ranks > 1:
            own = {"distributed_backend": "gloo", "distributed_world_size": ranks, "distributed_no_spawn": True}
            job.distributed_training.update(own, distributed_init_method=f"file://{log.with_suffix('.rendezvous')}")
        jobs.append(job)
    processes = [
        context.Process(target=_work, args=(jobs, rank, str(rank_log(log, rank)), _found(log, rank)))
        for rank in range(ranks)
    ]
    codes = ended(processes)
    assert codes == [0] * ranks, (codes, log.read_text()[-3000:])
    found = [json.loads(_found(log, rank).read_text()) for rank in range(ranks)]
    # The norm is of a rank's own copy of the gradient: where they differ, so will the weights.
    assert all(each == found[0] for each in found)
    return found[0]


def _found(log: Path, rank: int) -> Path:
    return log.with_suffix(f".{rank}.json")


def _work(jobs: list[DictConfig], rank: int, log: str, found: Path) -> None:
    print_to(log)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # fairseq's own computes norms in single precision.
    FairseqOptimizer.clip_grad_norm = _clip
    curve: Curve = []
    _note(curve)
    done = []
    for job in jobs:
        job.distributed_training.distributed_rank = rank
        distributed_utils.call_main(job, main)
        done.append([dict(logged) for logged in curve])
        curve.clear()
    found.write_text(json.dumps(done))


def _clip(optimizer: Any, most: float, aggregate_norm_fn: Any = None) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(list(optimizer.params), most)


def _note(curve: Curve) -> None:
    """Have every trainer of this process add to the curve."""
    train, validate = Trainer.train_step, Trainer.valid_step

    def train_step(*args: Any, **settings: Any) -> Any:
        with metrics.aggregate() as meters:
            logged = train(*args, **settings)
        names = ("loss", "nll_loss", "auxiliary_loss", "gnorm", "negatives", "top1")
        curve.append({name: float(meters[name].avg) for name in names if name in meters})
        return logged

    def valid_step(*args: Any, **settings: Any) -> Any:
        with metrics.aggregate() as meters:
            logged = validate(*args, **settings)
        if "valid_loss" not in curve[-1]:
            curve.append({"valid_loss": 0.0, "valid_size": 0.0})
        curve[-1]["valid_loss"] += float(meters["loss"].sum)
        curve[-1]["valid_size"] += float(meters["loss"].count)
        return logged

    Trainer.train_step, Trainer.valid_step = train_step, valid_step
