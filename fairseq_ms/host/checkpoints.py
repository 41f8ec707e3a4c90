"""A checkpoint is complete or absent, is recognised when it is damaged, and runs no code.

fairseq renames what may not have reached the disk yet, and after a failed attempt appends to the half of a file
that the attempt has left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import distributed

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import whole_files

logger = logging.getLogger(__name__)

# What a checkpoint holds, beside fairseq's own state: that of the epoch within which it was written.
MULTIPLE = "required_batch_size_multiple"
# And the checksum of the dictionary.
DICTIONARY = "dictionary"
# And, once it is read, the model's settings.
MODEL = "model_settings"
# And those of its settings that are no more and had another value than the one that is left.
OTHERS = "settings_that_are_gone"
# Settings that are no more, by group, and what is left of each; of a task's and a model's, fairseq itself drops those.
_GONE: dict[str, dict[str, Any]] = {
    "criterion": {"log_q_correction": None, "log_q_blocks": None, "gather_negatives": False},
    "optimizer": {"no_nesterov": False, "adjust_lr_fn": "original", "muon_momentum": 0.95},
}

# What omegaconf replaces by what a function returns for it: ${oc.env:HOME}.
_COMPUTED = re.compile(r"\$\{\s*[\w.]+\s*:")

# The flags of fairseq's older optimizers and schedulers, among them sgd and adafactor: names and values.
torch.serialization.add_safe_globals([argparse.Namespace])


def copy_whole(original: Callable[..., Any], src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """``PathManager.copy``, whose copies are complete or absent, too."""
    if not PathManager.supports_rename(dst_path) or (os.path.exists(dst_path) and not overwrite):
        return original(src_path, dst_path, overwrite=overwrite)

    def fill(file: BinaryIO) -> None:
        with open(src_path, "rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)

    whole_files.write(dst_path, fill)
    return True


def _computed(settings: Any) -> Iterator[str]:
    """Of settings nested in dictionaries and lists, the texts that omegaconf would compute, as from the environment."""
    if isinstance(settings, str) and _COMPUTED.search(settings):
        yield settings
    elif isinstance(settings, dict | argparse.Namespace):
        yield from _computed(list((settings if isinstance(settings, dict) else vars(settings)).values()))
    elif isinstance(settings, list | tuple):
        yield from itertools.chain.from_iterable(map(_computed, settings))


def load_known(
    original: Callable[..., Any],
    filenames: list[str],
    arg_overrides: dict[str, Any] | None = None,
    task: Any = None,
    strict: bool = True,
    suffix: str = "",
    num_shards: int = 1,
    state: dict[str, Any] | None = None,
) -> Any:
    """``load_model_ensemble_and_task``, with one sentence for checkpoints of models that are not known here."""
    try:
        return original(filenames, arg_overrides, task, strict, suffix, num_shards, state)
    except UsageError:
        raise
    except Exception as error:
        for path in filenames:
            if os.path.isfile(path) and (wrong := _unknown(whole_files.read(path), task is None)) is not None:
                raise UsageError(
                    f"--path must name a checkpoint of a model that is known here: {path} {wrong}"
                ) from error
        raise


def _unknown(state: Any, with_task: bool) -> str | None:
    """What a checkpoint lacks, or has that is not known here; None where that is not what is wrong with it."""
    state = state if isinstance(state, dict) else {}
    if not isinstance(state.get("model"), dict):
        return "holds no weights by their names"
    cfg = state.get("cfg")
    if cfg is None:
        return None if state.get("args") is not None else "holds no settings of its model"
    known: dict[str, Any] = {"model": {**ARCH_MODEL_REGISTRY, **MODEL_REGISTRY}}
    if with_task:
        known["task"] = TASK_REGISTRY
    for group, registry in known.items():
        chosen = cfg.get(group) if isinstance(cfg, dict) else None
        name = chosen.get("_name") if isinstance(chosen, dict) else getattr(chosen, "_name", None)
        if name not in registry:
            return f"is of {'no' if name is None else 'the unknown'} {group}{'' if name is None else f' {name}'}"
    return None


def load_checked(original: Callable[..., Any], path: str, *args: Any, **settings: Any) -> Any:
    """``load_checkpoint_to_cpu``, with one sentence for what is damaged or holds code."""
    local = PathManager.get_local_path(path)
    if os.path.isfile(local):
        whole_files.check(local)
        try:
            held = whole_files.read(local)
            written = [held.get(name) for name in ("cfg", "args")]
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"a checkpoint must hold tensors and plain values alone, since others could run code: {path} holds them"
            ) from error
        except AttributeError:
            raise UsageError(f"a checkpoint must be a dictionary: {path} holds something else") from None
        if found := next(_computed(written), None):
            raise UsageError(f"a checkpoint must hold settings that are values: {path} has {found!r}, to be computed")
    state = original(path, *args, **settings)
    # Older ones have it among their flags alone, of which only the rank that reads them hears.
    cfg = state.get("cfg")
    multiple, model, *groups = (
        OmegaConf.select(cfg, name) if isinstance(cfg, DictConfig) else None
        for name in (f"dataset.{MULTIPLE}", "model", *_GONE)
    )
    others = []
    for group, names in zip(groups, _GONE.values()):
        if not isinstance(group, DictConfig):
            continue
        for name, left in names.items():
            with open_dict(group):
                value = group.pop(name, left)
            if left is not None and value != left:
                others.append(f"--{name.replace('_', '-')} {value}")
    if state.get("extra_state"):
        if multiple is not None:
            state["extra_state"].setdefault(MULTIPLE, multiple)
        if others:
            state["extra_state"][OTHERS] = ", ".join(others)
        if isinstance(model, DictConfig):
            state["extra_state"][MODEL] = OmegaConf.to_container(model, enum_to_str=True)
    if (dictionary := (state.get("extra_state") or {}).get(DICTIONARY)) is not None:
        # fairseq shows a task its state, wherever a model is loaded to be evaluated.
        state["task_state"] = {**state.get("task_state", {}), DICTIONARY: dictionary}
    return state


def newest_intact(trainer: Any, filename: str) -> str:
    """The file to go on from, on all ranks alike: ``filename``, or where the last checkpoint is damaged an older one.

    Raises UsageError where none is intact. A checkpoint in several parts has to fit together, and the user's own
    ``--restore-file`` is read or refused.
    """
    last = os.path.join(trainer.cfg.checkpoint.save_dir, "checkpoint_last.pt")
    if filename != last or trainer.checkpoint_suffix or not os.path.isfile(last):
        return filename
    found = _newest_intact(last) if trainer.data_parallel_rank == 0 else None
    if trainer.data_parallel_world_size > 1:
        found = distributed_utils.broadcast_object(
            found, src_rank=0, group=trainer.data_parallel_process_group, dist_device=trainer.device
        )
    if found is None:
        raise UsageError(
            f"--save-dir must hold an intact checkpoint to go on from: {last} is damaged, and there is no other "
            "(remove it to begin anew)"
        )
    return found


def _newest_intact(last: str) -> str | None:
    """The checkpoint to go on from."""
    wrong = whole_files.defect(last)
    if wrong is None:
        return last
    for updates, path in _others(last):
        if whole_files.defect(path) is None:
            logger.warning(
                f"{last} is damaged ({wrong}): going on from {path}, after update {updates}, which is the newest "
                "intact checkpoint in --save-dir"
            )
            return path
    return None


def _others(last: str) -> list[tuple[int, str]]:
    """The other checkpoints of a run's folder that training can go on from, newest first, by their updates."""
    found = []
    for path in sorted(Path(last).parent.glob("checkpoint*.pt")):
        with contextlib.suppress(Exception):  # garbled archives make torch raise nearly everything
            state = whole_files.read(str(path))
            if str(path) != last and "train_iterator" in state["extra_state"]:
                found.append((int(state["optimizer_history"][-1]["num_updates"]), str(path)))
    return sorted(found, reverse=True)


def broadcast_any(original: Callable[..., Any], obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """``_broadcast_object_slow``, by which the rank that reads a checkpoint shows it to the others.

    fairseq uses ``torch.load``, which since torch 2.6 refuses configurations: no run of several processes could resume.
    """
    objects = [obj]
    distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
    return objects[0]
