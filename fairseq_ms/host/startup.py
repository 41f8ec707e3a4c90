"""What happens when the plugin is loaded: fairseq is taught what it lacks, and all that registers with it does."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fairseq_ms import errors
from fairseq_ms.host import compat, uncompiled
from fairseq_ms.presets import registry

REGISTERING = ("criterions", "optim", "tasks", "models")

_begun = False


def register_all() -> None:
    """Make fairseq importable, teach it, and import all that registers with it; once.

    Every room that is imported on the way asks for it again.
    """
    global _begun
    if _begun:
        return
    _begun = True
    try:
        compat.prepare()
        teach()
        for room in REGISTERING:
            package = importlib.import_module(f"fairseq_ms.{room}")
            for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
                importlib.import_module(f"{package.__name__}.{module}")
        registry.register_with_fairseq()
    except BaseException:
        _begun = False
        raise


@functools.cache
def teach() -> None:
    """Replace what fairseq does not do right, each function once (docs/host.md says why)."""
    # hydra catches errors itself and prints a traceback of its own unless it is asked to let them pass.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.excepthook = errors.show
    for owner, name, around in targets():
        replace(owner, name, around)


def targets() -> list[tuple[Any, str, Callable[..., Any]]]:
    """All that is replaced in fairseq: where it is, its name, and the class or function that stands for it.

    A function is called with the one that it replaces as its first argument.
    """
    from fairseq_ms.host import checkpoints, context_window, data, interactive, launch, prompts, rules, saving, trainer

    with compat.logging_untouched():
        importlib.import_module("fairseq_cli.train")
    from fairseq import checkpoint_utils, options, scoring
    from fairseq.data import data_utils, indexed_dataset
    from fairseq.distributed import utils as distributed_utils
    from fairseq.file_io import PathManager
    from fairseq.models import BaseFairseqModel, distributed_fairseq_model
    from fairseq.tasks import FairseqTask, LegacyFairseqTask
    from fairseq.tasks.language_modeling import LanguageModelingTask

    found: list[tuple[Any, str, Callable[..., Any]]] = [
        (options, "parse_args_and_arch", launch.parse_plainly),
        (distributed_utils, "call_main", launch.run_together),
        (distributed_fairseq_model, "DistributedDataParallel", launch.on_its_own_device),
        (checkpoint_utils, "verify_checkpoint_directory", launch.try_without_trace),
        (checkpoint_utils, "load_checkpoint_to_cpu", checkpoints.load_checked),
        (checkpoint_utils, "load_model_ensemble_and_task", checkpoints.load_known),
        (distributed_utils, "_broadcast_object_slow", checkpoints.broadcast_any),
        (PathManager, "copy", checkpoints.copy_whole),
        (indexed_dataset, "make_dataset", data.make_checked),
        (indexed_dataset, "_warmup_mmap_file", data.read_no_more),
        (data_utils, "batch_by_size", data.batch_rows),
        (FairseqTask, "valid_step", data.validate_any),
        (FairseqTask, "build_generator", rules.build_generator),
        (FairseqTask, "load_state_dict", data.refuse_other_dictionary),
        (LanguageModelingTask, "eval_lm_dataloader", context_window.with_contexts),
        (LegacyFairseqTask, "build_model", trainer.build_for),
        (BaseFairseqModel, "prepare_for_inference_", prompts.as_prepared),
    ]
    for program in _programs("fairseq_cli.train"):
        found += [(program, "Trainer", trainer.Trainer), (program, "validate_and_save", saving.save_and_stop)]
    found += [(program, "main", rules.refuse_rows) for program in _programs("fairseq_cli.generate")]
    for program in _programs("fairseq_cli.interactive"):
        numbered = interactive.Numbered()
        found += [(program, "buffered_read", numbered.read), (program, "make_batches", numbered.batch)]
    if not uncompiled.has("fairseq.libbleu"):
        found.append((scoring, "build_scorer", uncompiled.by_sacrebleu))
    return found


def _programs(name: str) -> list[ModuleType]:
    """The module of a command as far as it is imported; run by ``python -m``, or by its file, it is the program."""
    file = importlib.util.find_spec(name).origin  # type: ignore[union-attr]
    modules = [sys.modules.get(name), sys.modules["__main__"]]
    return [module for module in modules if module is not None and getattr(module, "__file__", None) == file]


def replace(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put a class in the place of ``owner.name``, or a function that calls ``around(original, ...)``."""
    if isinstance(around, type):
        setattr(owner, name, around)
        return
    original, static = getattr(owner, name), isinstance(vars(owner)[name], staticmethod)

    @functools.wraps(original)
    def replaced(*args: Any, **settings: Any) -> Any:
        return around(original, *args, **settings)

    # fairseq looks for a method's arguments before it passes them.
    replaced.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(replaced) if static else replaced)
