"""Models of fairseq's flags, with random weights and without data."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, FairseqLanguageModel
from fairseq.tasks import TASK_REGISTRY
from omegaconf import DictConfig
from torch import nn

from fairseq_ms.errors import UsageError
from fairseq_ms.lm.config import enough_symbols
from fairseq_ms.lm.streaming import StreamingLanguageModel


def build(
    flags: Sequence[str], vocabulary: int, device: torch.device | str = "cpu", own: Sequence[str] = ()
) -> tuple[FairseqLanguageModel, DictConfig]:
    """Model and configuration of fairseq's flags (``--arch ...``) over a dictionary of so many symbols.

    No data is read; on the meta device, weights take no memory. Raises UsageError for unknown or contradictory flags.
    """
    cfg = parse(flags, own)
    return build_model(cfg, vocabulary, device), cfg


def parse(flags: Sequence[str], own: Sequence[str] = ()) -> DictConfig:
    """Configuration of fairseq's flags (``--arch ...``).

    Raises UsageError on flags that fairseq does not know, which names the nearest, also of the command's ``own`` ones.
    """
    if not any(flag == "--arch" or flag.startswith("--arch=") for flag in flags):
        raise UsageError("--arch must name an architecture: got none (or give a checkpoint with --path)")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parser = options.get_training_parser(default_task=_task_of(flags))
            vars(parser)["own_flags"] = own
            # The data folder, which is positional, is never looked at.
            args = options.parse_args_and_arch(parser, ["unread", *flags])
    except SystemExit as stop:
        raise UsageError(errors.getvalue().strip().splitlines()[-1].split("error: ")[-1]) from stop
    return convert_namespace_to_omegaconf(args)


def _task_of(flags: Sequence[str]) -> str:
    """The task that a model of these flags is trained with, unless they name one."""
    after = dict(itertools.pairwise(flags))
    given = next((flag.removeprefix("--arch=") for flag in flags if flag.startswith("--arch=")), after.get("--arch"))
    streaming = issubclass(ARCH_MODEL_REGISTRY.get(given, nn.Module), StreamingLanguageModel)
    return "streaming_language_modeling" if streaming else "language_modeling"


def build_model(
    cfg: DictConfig,
    vocabulary: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> FairseqLanguageModel:
    """The model of a configuration over a dictionary of so many symbols."""
    task = TASK_REGISTRY[cfg.task._name](cfg.task, dictionary_of(vocabulary))
    if vocabulary < (needed := enough_symbols(cfg.model, 0, beyond=0)):
        raise UsageError(f"--vocabulary must be at least {needed}, the last of the adaptive cutoffs: got {vocabulary}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return task.build_model(cfg.model)
    finally:
        torch.set_default_dtype(before)


def dictionary_of(vocabulary: int) -> Dictionary:
    """Made-up words, so many with fairseq's special symbols; UsageError when there is no room for a word."""
    dictionary = Dictionary()
    if vocabulary <= len(dictionary):
        raise UsageError(f"--vocabulary must be more than the {len(dictionary)} special symbols: got {vocabulary}")
    for index in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


def architecture(cfg: FairseqDataclass) -> str:
    """The model of a configuration, whose name may be that of a preset."""
    return str(ARCH_MODEL_NAME_REGISTRY.get(str(cfg._name), cfg._name))
