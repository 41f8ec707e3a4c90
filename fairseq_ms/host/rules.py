"""Settings that fairseq accepts and that cannot work, or not as they are meant."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingTask

from fairseq_ms.errors import UsageError
from fairseq_ms.lm.config import betas

logger = logging.getLogger(__name__)

# Settings of generation without a meaning for a language model of this package.
_IDLE = (
    # fairseq's dropout layers alone stay on; here a model in evaluation has none.
    *("retain_dropout", "retain_dropout_modules"),
    # There is no source that attention or constraints could be about.
    *("print_alignment", "replace_unk", "constraints"),
    # Of refining outputs, and of translating in two passes.
    *("iter_decode_eos_penalty", "iter_decode_max_iter", "iter_decode_force_max_iter", "iter_decode_with_beam"),
    *("iter_decode_with_external_reranker", "print_step", "retain_iter_history", "decoding_format"),
    *("beam_mt", "lenpen_mt", "max_len_a_mt", "max_len_b_mt", "eos_token"),
)
# What launchers say to the processes they start.
_LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def launched() -> int:
    """How many processes a launcher has started; 1 where there is none."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _LAUNCHED) else 1


def setting(cfg: Any, name: str, default: Any = None) -> Any:
    """The value of ``group.name`` in a configuration of any type, or ``default`` where it has none."""
    for part in name.split("."):
        cfg = getattr(cfg, part, None)
    return default if cfg is None else cfg


def refuse(cfg: Any) -> None:
    """Raise UsageError for settings that fairseq accepts and that cannot work."""
    backend = str(cfg.distributed_training.ddp_backend)
    if backend == "fully_sharded":
        raise UsageError(
            "--ddp-backend must be pytorch_ddp or legacy_ddp, since each process needs all weights of a model to carry "
            f"its memory and to write checkpoints (user_dir_examples/plain_pytorch shards a model): got {backend}"
        )
    if setting(cfg, "checkpoint.write_checkpoints_asynchronously"):
        raise UsageError(
            "--write-checkpoints-asynchronously must be left out: training waits until a checkpoint is on the disk"
        )
    seed = setting(cfg, "common.seed", 1)
    numbers = {"--seed": (seed, 0), "--num-workers": (setting(cfg, "dataset.num_workers", 0), 0)}
    numbers["--update-freq"] = min(setting(cfg, "optimization.update_freq", [1])), 1
    numbers["--lr"] = min(setting(cfg, "optimization.lr", [0])), 0
    numbers["--softmax-batch"] = setting(cfg, "eval_lm.softmax_batch", 0), 0
    shard, shards = setting(cfg, "dataset.shard_id", 0), setting(cfg, "dataset.num_shards", 1)
    numbers["--shard-id"] = shard, 0
    for flag, (value, lowest) in numbers.items():
        if not value >= lowest:
            raise UsageError(f"{flag} must be at least {lowest}: got {value}")
    if seed >= 2**32:
        raise UsageError(f"--seed must be at most {2**32 - 1}: got {seed}")
    if shard >= max(shards, 1):
        raise UsageError(f"--shard-id must be below --num-shards {shards}: got {shard}")
    # fairseq-validate and other tasks have none.
    tokens, context = setting(cfg, "task.tokens_per_sample"), setting(cfg, "eval_lm.context_window", 0)
    if tokens is not None and tokens <= context:
        least = f"1 more than --context-window {context}" if context else "at least 1"
        raise UsageError(f"--tokens-per-sample must be {least}: got {tokens}")


def refuse_rows(original: Callable[..., Any], cfg: Any) -> Any:
    """``main`` of fairseq-generate, which continues lines; raises UsageError for rows cut out of a corpus.

    They leave no room to continue them, but can be scored, or begun anew from a prefix: not those of a task of streams,
    which has ``before_checkpoint``.
    """
    if isinstance(cfg, Namespace):
        cfg = convert_namespace_to_omegaconf(cfg)
    cuts = str(getattr(cfg.task, "sample_break_mode", "eos") or "none") == "none"
    task = TASK_REGISTRY.get(getattr(cfg.task, "_name", None), object)
    continues = not (cfg.generation.prefix_size or cfg.generation.score_reference)
    if cuts and issubclass(task, LanguageModelingTask) and (continues or hasattr(task, "before_checkpoint")):
        raise UsageError(
            "--sample-break-mode must be eos for fairseq-generate, so that every line is a prompt: got none"
        )
    if issubclass(task, LanguageModelingTask) and cfg.generation.diverse_beam_groups > 0:
        raise UsageError(
            "--diverse-beam-groups must be left out of fairseq-generate, whose search takes a row's number in the data "
            f"for its place in a batch (fairseq-interactive takes the flag): got {cfg.generation.diverse_beam_groups}"
        )
    return original(cfg)


def refuse_idle(generation: Any, names: Iterable[str] = _IDLE, why: str = "a language model") -> None:
    """Raise UsageError for a setting of generation that would change nothing, or end in a traceback."""
    usual = GenerationConfig()
    for name in names:
        value = getattr(generation, name, None)
        if value not in (None, getattr(usual, name)):
            raise UsageError(
                f"--{name.replace('_', '-')} must be left out, since it has no meaning for {why}: got {value}"
            )


def build_generator(
    original: Callable[..., Any], task: Any, models: Any, args: Any, *more: Any, **settings: Any
) -> Any:
    """A task's ``build_generator``; raises UsageError for settings without a meaning for models of this package."""
    if any(is_ours(model) for model in models):
        refuse_idle(args)
        if (beam := getattr(args, "beam", 1)) < 1:
            raise UsageError(f"--beam must be at least 1: got {beam}")
        if size := getattr(args, "no_repeat_ngram_size", 0):
            why = "fairseq looks for what is repeated at the end of its buffer, and not of the text"
            raise UsageError(f"--no-repeat-ngram-size must be left out, since {why}: got {size}")
    return original(task, models, args, *more, **settings)


def is_ours(model: Any) -> bool:
    """Whether a model is one of this package."""
    return type(model).__module__.startswith("fairseq_ms.")


def refuse_to_train(cfg: Any) -> None:
    """Raise UsageError where a training would fail, or train alone beside others that write to the same folder."""
    refuse(cfg)
    if cfg.common.fp16 and not torch.cuda.is_available():
        raise UsageError("--fp16 must be left out on a machine without a GPU: torch finds none")
    if (given := getattr(cfg.optimizer, "adam_betas", None)) is not None:
        betas(given)
    row = getattr(cfg.task, "tokens_per_sample", None)
    for flag in ("max_tokens", "max_tokens_valid"):
        room = getattr(cfg.dataset, flag)
        # Rows are of this length but where lines or documents end them.
        if None not in (row, room) and room < row and str(cfg.task.sample_break_mode) in ("none", "None"):
            raise UsageError(
                f"--{flag.replace('_', '-')} must be at least --tokens-per-sample {row}, so that a row fits: got {room}"
            )
    # fairseq-hydra-train decides how many processes there are before it imports this package.
    count = launched()
    if count > 1 and cfg.distributed_training.distributed_world_size == 1:
        raise UsageError(
            f"distributed_training.distributed_world_size={count} must be given to fairseq-hydra-train where a "
            f"launcher starts {count} processes on GPUs, since each would train alone (on CPUs, use fairseq-train): "
            "got 1"
        )


def warn_of_warmup(cfg: Any) -> None:
    """Warn where the whole training is a warm-up, and the rate never what it is said to be.

    A cosine after it, which would then have no updates, gets one: fairseq divides by their number.
    """
    # Optimizers and schedules that fairseq registers without a dataclass have an argparse namespace here.
    groups = getattr(cfg.optimizer, "groups", None) or {}
    parts = [cfg.lr_scheduler, *(getattr(group, "lr_scheduler", None) for group in groups.values())]
    warmup = max(getattr(part, "warmup_updates", None) or 0 for part in parts)
    if 0 < cfg.optimization.max_update <= warmup and distributed_utils.get_global_rank() == 0:
        logger.warning(
            f"--max-update should be greater than --warmup-updates {warmup}, or the learning rate never reaches --lr: "
            f"got {cfg.optimization.max_update}"
        )
    for part in parts:
        if getattr(part, "lr_period_updates", 1) <= 0 and cfg.optimization.max_update == part.warmup_updates:
            part.lr_period_updates = 1
