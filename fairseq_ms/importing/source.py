"""A model of somebody else's, as ours is built of it and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.tasks import TASK_REGISTRY
from omegaconf import OmegaConf, open_dict

from fairseq_ms import core
from fairseq_ms.errors import UsageError
from fairseq_ms.importing.weights import Stored, Tensors, made, through_windows
from fairseq_ms.lm.config import flag
from fairseq_ms.tools import report, untrained, whole_files

CHECKPOINT = "checkpoint.pt"


@dataclass
class Source:
    """A model of somebody else's.

    Attributes:
        flags: of ours, by name
        task: flags of the task
        stored: its tensors
        layers: how many of them there are tensors of
        tensor: makes ours of them
        symbols: of the dictionary, fairseq's four special ones first
        files: what else is written beside the checkpoint, ``dict.txt`` among it
        idle: a pattern of names of tensors that hold nothing of the model
    """

    flags: dict[str, Any]
    task: dict[str, Any]
    stored: Mapping[str, Stored]
    layers: int
    tensor: Tensors
    symbols: Sequence[str]
    files: Mapping[str, str]
    idle: str

    @property
    def arch(self) -> str:
        """A ``vanilla_lm``, or with windows a ``retina_lm``."""
        return "retina_lm" if self.flags.get("scale_windows") else "vanilla_lm"

    def command(self) -> list[str]:
        """The flags of ``fairseq-train`` that describe the model."""
        given = {**self.flags, **self.task}
        if given.get("adaptive_softmax_cutoff"):
            given["criterion"] = "adaptive_loss"
        told = [flag(name) if value is True else f"{flag(name)}={value}" for name, value in given.items()]
        return ["--arch", self.arch, *(text for text, value in zip(told, given.values()) if value not in (None, False))]

    def write(self, out: Path, more: Mapping[str, str]) -> core.LanguageModel:
        """Write the folder with the checkpoint, all of it or nothing; the model.

        Raises UsageError for flags that a model here refuses, weights that do not fit, and a folder that is not empty.
        """
        cfg = untrained.parse(self.command())
        with open_dict(cfg):
            cfg.task.data = str(out.absolute())
        if self.layers != int(cfg.model.decoder_layers):
            rule = f"SOURCE must have the {cfg.model.decoder_layers} layers that its configuration says"
            raise UsageError(f"{rule}: got weights of {self.layers}")
        dictionary = Dictionary()
        for symbol in self.symbols[len(dictionary) :]:
            dictionary.add_symbol(symbol)
        with torch.device("meta"):
            model = TASK_REGISTRY[cfg.task._name](cfg.task, dictionary).build_model(cfg.model)
        ours, tensor = model.decoder.core, self.tensor
        if isinstance(ours, core.Retina):
            config = ours.config
            tensor = through_windows(tensor, ours.turns, config.key_heads, config.width_of_head)
        ours.load_state_dict(made(ours.state_dict(), self.stored, tensor, self.idle), assign=True)
        state = {
            "args": None,
            "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
            "model": model.state_dict(),
            "optimizer_history": [{"num_updates": 0, "optimizer_name": "", "lr_scheduler_state": {}}],
            "task_state": {},
            "extra_state": {},
        }
        with report.new_folder(out) as folder:
            whole_files.write(str(folder / CHECKPOINT), lambda file: torch.save(state, file), "OUT")
            for name, text in {**self.files, **more}.items():
                report.write_text(folder / name, text)
        found: core.LanguageModel = ours
        return found
