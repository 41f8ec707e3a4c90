"""The processes that a launcher such as torchrun starts train together, on GPUs or on CPUs.

fairseq takes the number of processes from its command line, where the default is the number of GPUs that it sees. On
nodes with one GPU, and on CPUs, every process would train alone, and all of them write the same checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.trainer import Trainer
from torch import nn

from fairseq_ms.errors import UsageError
from fairseq_ms.host.wrapping import wrap

# What launchers say to the processes they start.
_LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def install() -> None:
    """Have fairseq believe a launcher, torch's DistributedDataParallel take models on a CPU, and refuse to shard them.

    Calling it again does nothing.
    """
    wrap(distributed_utils, "call_main", _unsharded)
    wrap(distributed_utils, "infer_init_method", _as_launched)
    wrap(distributed_fairseq_model, "DistributedDataParallel", _where_the_model_is)
    wrap(Trainer, "__init__", _together)


def _unsharded(original: Callable[..., Any], cfg: Any, *args: Any, **settings: Any) -> Any:
    """``call_main``; raises UsageError for the backend that shards weights."""
    backend = str(cfg.distributed_training.ddp_backend)
    if backend == "fully_sharded":
        raise UsageError(
            "--ddp-backend must be pytorch_ddp or legacy_ddp, since each process needs all weights of a model to carry "
            f"its memory and to write checkpoints: got {backend}"
        )
    return original(cfg, *args, **settings)


def _as_launched(original: Callable[..., Any], cfg: Any, *args: Any, **settings: Any) -> None:
    """``infer_init_method``: how many processes there are, which one this is, and how they find each other."""
    if _launched() == 1 or cfg.distributed_init_method is not None or cfg.tpu or cfg.pipeline_model_parallel:
        original(cfg, *args, **settings)
        return
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
    cfg.distributed_rank = int(os.environ["RANK"])
    # Of the node's GPUs; nodes need not have as many of them.
    cfg.device_id = int(os.environ.get("LOCAL_RANK", cfg.distributed_rank)) % max(1, torch.cuda.device_count())
    cfg.distributed_no_spawn = True


def _launched() -> int:
    """How many processes a launcher has started; 1 where there is none."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _LAUNCHED) else 1


def _together(original: Callable[..., None], trainer: Any, cfg: Any, *args: Any, **settings: Any) -> None:
    """``Trainer()``; raises UsageError where it would train alone, beside others that write to the same folder.

    ``fairseq-hydra-train`` decides how many processes there are before it imports this package.
    """
    launched = _launched()
    if launched > 1 and cfg.distributed_training.distributed_world_size == 1:
        raise UsageError(
            f"distributed_training.distributed_world_size={launched} must be given to fairseq-hydra-train where a "
            f"launcher starts {launched} processes on GPUs, since each would train alone (on CPUs, use fairseq-train): "
            "got 1"
        )
    original(trainer, cfg, *args, **settings)


def _where_the_model_is(
    original: Callable[..., Any], module: nn.Module, device_ids: Any, output_device: Any, **settings: Any
) -> Any:
    """``DistributedDataParallel``, to which fairseq names a GPU for every process."""
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    return original(module, device_ids=device_ids, output_device=output_device, **settings)
