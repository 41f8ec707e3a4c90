"""Checkpoints and the data they are asked about, loaded by fairseq's own functions."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.models import FairseqLanguageModel
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import DictConfig
from torch import Tensor

from fairseq_ms import register
from fairseq_ms.core.streaming import StreamingModel
from fairseq_ms.errors import UsageError
from fairseq_ms.tools.arguments import check_checkpoint, split_label


@dataclass
class Checkpoint:
    """A trained model in evaluation mode, with its task.

    Attributes:
        label: how tables and figures call it
        path: the file it came from
        model: the fairseq language model
        task: the fairseq task it was trained on, looking at the data asked for
        cfg: the configuration it was trained with
    """

    label: str
    path: str
    model: FairseqLanguageModel
    task: LanguageModelingTask
    cfg: DictConfig

    @property
    def dictionary(self) -> Dictionary:
        return self.task.source_dictionary

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def streaming(self) -> bool:
        """Whether the model hands a memory from one segment to the next."""
        return isinstance(getattr(self.model.decoder, "core", None), StreamingModel)

    @property
    def segment(self) -> int:
        """The number of tokens of a training sample; for a streaming model, of a segment."""
        return int(self.model.decoder.core.segment_len if self.streaming else self.cfg.task.tokens_per_sample)

    @property
    def adds_bos(self) -> bool:
        """Whether every sample begins with an extra symbol, which takes a position and is never scored."""
        return bool(getattr(self.task.args, "add_bos_token", False))

    @property
    def longest(self) -> int | None:
        """The most tokens that one window can hold, an extra first symbol not counted; None if there is no limit."""
        core = getattr(self.model.decoder, "core", None)
        if core is not None and core.max_length() is None:
            return None
        return int(self.model.max_positions())

    @property
    def folder(self) -> Path:
        """Where the data lie that it is asked about."""
        return Path(utils.split_paths(str(self.task.args.data))[0])

    def check_fits(self, flag: str, tokens: int) -> None:
        """Raise UsageError for a flag that asks for no tokens, or for more than the model has positions for."""
        if self.longest is not None and not 1 <= tokens <= self.longest:
            raise UsageError(
                f"{flag} must lie between 1 and the {self.longest} positions of {self.label}: got {tokens}"
            )
        if tokens < 1:
            raise UsageError(f"{flag} must have at least 1 token: got {tokens}")

    def describe(self) -> dict[str, object]:
        """What JSON files say about the checkpoint."""
        return {
            "label": self.label,
            "path": self.path,
            "arch": str(self.cfg.model._name),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "tokens_per_sample": self.segment,
            "data": str(self.task.args.data),
        }

    def documents(self, split: str, limit: int | None = None) -> list[Tensor]:
        """The token sequences of a split that are scored each on its own.

        All of a split is one sequence unless the model was trained with ``--sample-break-mode eos``, where every
        line is one. ``limit`` cuts the split after so many tokens. Raises UsageError when there is no such split.
        """
        lines = self._lines(split)
        by_line = str(getattr(self.task.args, "sample_break_mode", "none")) == "eos"
        kept: list[Tensor] = []
        room = sys.maxsize if limit is None else limit
        for index in range(len(lines)):
            line = lines[index].long()
            if room <= 0 or (by_line and kept and line.numel() > room):
                break
            kept.append(line[:room])
            room -= line.numel()
        return kept if by_line else [torch.cat(kept)]

    def text(self, split: str, limit: int | None = None) -> Tensor:
        """All of a split as one sequence, as ``documents`` has it."""
        return torch.cat(self.documents(split, limit))

    def token_counts(self, split: str = "train") -> np.ndarray:
        """How often each symbol occurs in a split (V,), read line by line; UsageError when there is no such split."""
        lines = self._lines(split)
        counts = np.zeros(len(self.dictionary), dtype=np.int64)
        for index in range(len(lines)):
            np.add.at(counts, lines[index].numpy(), 1)
        return counts

    def _lines(self, split: str) -> FairseqDataset:
        lines = data_utils.load_indexed_dataset(str(self.folder / split), self.dictionary, None)
        if lines is None or len(lines) == 0:
            raise UsageError(f"--gen-subset must name a split of {self.folder}: there is no {split!r}")
        return lines


def load(spec: str, data: str | None = None, cpu: bool = False) -> Checkpoint:
    """Load ``[LABEL=]FILE``, whose model is then asked about the binarised data in the folder ``data``.

    Raises UsageError when the file is missing or is no checkpoint of a language model, when its model does
    not predict the next token, or not all symbols, and when the folder holds no dictionary or another one.
    """
    register()
    label, path = split_label(spec)
    check_checkpoint(path)
    overrides = {"data": data} if data is not None else None
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(path, overrides)
        stored = state.get("cfg") or state.get("args")
    except (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"CHECKPOINT must be a file that fairseq-train wrote: {path} is not ({error})") from error
    if stored is None or "model" not in state:
        raise UsageError(f"CHECKPOINT must be a file that fairseq-train wrote: {path} holds no model")
    task_cfg = getattr(state.get("cfg"), "task", stored)
    folder = utils.split_paths(str(getattr(task_cfg, "data", None)))[0]
    if not (Path(folder) / "dict.txt").is_file():
        raise UsageError(f"--data must be a folder that fairseq-preprocess wrote: {folder} holds no dict.txt")
    try:
        (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([path], overrides, state=state)
    except (RuntimeError, ValueError) as error:
        if data is None or "size mismatch" not in str(error):
            raise
        raise UsageError(f"--data {data} has another dictionary than the one {path} was trained with") from None
    if not hasattr(model, "decoder"):
        raise UsageError(
            f"CHECKPOINT must hold a model that predicts the next token: {path} holds {type(model).__name__}, "
            f"which was trained with --criterion {cfg.criterion._name} and has no decoder"
        )
    encoder = getattr(model, "encoder", None)
    # A prompt reader has no parameters, other than an encoder of translation.
    if encoder is not None and any(True for _ in encoder.parameters()):
        raise UsageError(f"CHECKPOINT must hold a language model: {path} holds {type(model).__name__}")
    if len(task.target_dictionary) < len(task.source_dictionary):
        raise UsageError(
            f"CHECKPOINT must predict all symbols that it reads: {path} was trained with --output-dictionary-size "
            f"{len(task.target_dictionary)} (fairseq-eval-lm with that flag scores all others as <unk>)"
        )
    if torch.cuda.is_available() and not cpu:
        model.cuda()
    model.eval()
    return Checkpoint(label, path, model, task, cfg)


def load_all(specs: Sequence[str], data: str | None = None, cpu: bool = False) -> list[Checkpoint]:
    """Load several checkpoints; raises UsageError as ``load`` does and when two have one label."""
    labels = [split_label(spec)[0] for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"CHECKPOINT must have a label of its own, as in NAME=FILE: got {label!r} twice")
    return [load(spec, data, cpu) for spec in specs]


def require_one_dictionary(checkpoints: Sequence[Checkpoint], tool: str) -> None:
    """Raise UsageError unless all checkpoints number the same symbols in the same way."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        if other.dictionary.symbols != first.dictionary.symbols:
            raise UsageError(
                f"{tool} compares checkpoints on the same tokens: "
                f"the dictionaries of {first.label} and {other.label} differ"
            )
