"""Checkpoints and the data they are asked about, loaded by fairseq's own functions."""

# Attributes of every trained model are properties here.
# mypy: disable-error-code="override"

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, utils
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.models import FairseqLanguageModel
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fairseq_ms import register
from fairseq_ms.core import CausalModel
from fairseq_ms.core.streaming import StreamingModel
from fairseq_ms.errors import UsageError, bin_hint
from fairseq_ms.tools.arguments import check_checkpoint, split_label
from fairseq_ms.tools.trained import Trained, check_finite, on_device


@dataclass
class Checkpoint(Trained):
    """A language model that fairseq trained, with its task.

    Attributes:
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
    def core(self) -> CausalModel:
        found = getattr(self.model.decoder, "core", None)
        if not isinstance(found, CausalModel):
            raise UsageError(f"CHECKPOINT must hold a model of fairseq_ms: {self.path} holds {self.arch}")
        return found

    @property
    def arch(self) -> str:
        return str(self.cfg.model._name)

    @property
    def dictionary(self) -> Dictionary:
        return self.task.source_dictionary

    @property
    def streaming(self) -> bool:
        return isinstance(getattr(self.model.decoder, "core", None), StreamingModel)

    @property
    def segment(self) -> int:
        return int(self.model.decoder.core.segment_len if self.streaming else self.cfg.task.tokens_per_sample)

    @property
    def adds_bos(self) -> bool:
        return bool(getattr(self.task.args, "add_bos_token", False))

    @property
    def longest(self) -> int | None:
        core = getattr(self.model.decoder, "core", None)
        if core is not None and core.max_length() is None:
            return None
        return int(self.model.max_positions())

    @property
    def data(self) -> str:
        return str(self.task.args.data)

    @property
    def folder(self) -> Path:
        return Path(utils.split_paths(self.data)[0])

    def read(self, source_BT: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        arguments = {"memory": memory} if self.streaming else {}
        features, extra = self.model.decoder(source_BT, features_only=True, **arguments)
        return features, extra.get("memory") if isinstance(extra, dict) else None

    def log_probs(self, features_BTD: Tensor, target_BT: Tensor) -> Tensor:
        output = (self.model.decoder.output_layer(features_BTD), None)
        found: Tensor = self.model.get_normalized_probs(output, log_probs=True, sample={"target": target_BT})
        return found

    def in_segments_of(self, tokens: int) -> None:
        self.task.args.tokens_per_sample, trained = tokens, self.model
        self.model = self.task.build_model(self.cfg.model).to(self.device).eval()
        self.model.load_state_dict(trained.state_dict())

    def lines(self, split: str) -> FairseqDataset:
        lines = data_utils.load_indexed_dataset(str(self.folder / split), self.dictionary, None)
        if lines is None or len(lines) == 0:
            raise UsageError(f"--gen-subset must name a split of {self.folder}: there is no {split!r}")
        return lines

    def flags(self) -> dict[str, Any]:
        """The model's flags, in the numbers that it was built with, wherever they came from."""
        known: Any = OmegaConf.to_container(self.cfg.model, resolve=True, enum_to_str=True)
        flags = {name: value for name, value in known.items() if not name.startswith("_") and name != "criterion"}
        positions = self.model.decoder.positions + int(self.adds_bos)
        built = {"add_bos_token": self.adds_bos, "tokens_per_sample": self.segment, "max_target_positions": positions}
        return flags | built

    def describe(self) -> dict[str, object]:
        """What JSON files say about the checkpoint."""
        return {
            "label": self.label,
            "path": self.path,
            "arch": self.arch,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "tokens_per_sample": self.segment,
            "data": self.data,
        }


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
        wanted = "a folder that fairseq-preprocess wrote, or the bin/ of fairseq-ms prepare"
        raise UsageError(f"--data must be {wanted}: {folder} holds no dict.txt{bin_hint(folder)}")
    try:
        (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([path], overrides, state=state)
    except (RuntimeError, ValueError) as error:
        if "size mismatch" not in str(error):
            raise
        raise UsageError(f"--data {folder} has another dictionary than the one {path} was trained with") from None
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
    check_finite(model, path)
    found = Checkpoint(label, path, on_device(model, cpu), task, cfg)
    found.by_line = str(getattr(task.args, "sample_break_mode", "none")) == "eos"
    return found


def require_one_dictionary(checkpoints: Sequence[Checkpoint], tool: str) -> None:
    """Raise UsageError unless all checkpoints number the same symbols in the same way."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        if other.dictionary.symbols != first.dictionary.symbols:
            raise UsageError(
                f"{tool} compares checkpoints on the same tokens: "
                f"the dictionaries of {first.label} and {other.label} differ"
            )
