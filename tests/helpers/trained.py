"""Small binarised corpora and checkpoint files, made in a moment and without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import make_builder
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig, OmegaConf

from fairseq_ms.tools import checkpoints

# Sizes of a model that runs in no time.
SIZES = {"decoder-embed-dim": 16, "decoder-ffn-embed-dim": 24, "decoder-attention-heads": 2, "dropout": 0}
NARROW = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))] + ["--attention-dropout", "0"]
TINY = [*NARROW, "--decoder-layers", "2"]


def write_corpus(folder: Path, splits: Mapping[str, Sequence[str]]) -> Path:
    """Binarise lines of space separated words as fairseq-preprocess does; words are numbered by frequency."""
    folder.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary()
    for line in splits["train"]:
        for word in line.split():
            dictionary.add_symbol(word)
    dictionary.finalize(padding_factor=1)
    dictionary.save(str(folder / "dict.txt"))
    for split, lines in splits.items():
        builder = make_builder(str(folder / f"{split}.bin"), impl="mmap", vocab_size=len(dictionary))
        for line in lines:
            builder.add_item(dictionary.encode_line(line, add_if_not_exist=False))
        builder.finalize(str(folder / f"{split}.idx"))
    return folder


def random_lines(seed: int, lines: int, words: int = 23, length: int = 17) -> list[str]:
    """Lines of words w0, w1, ..., of which the first are the most frequent."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, words + 1)
    drawn = torch.multinomial(weights.repeat(lines, 1), length, replacement=True, generator=generator)
    return [" ".join(f"w{int(word)}" for word in row) for row in drawn]


def configuration(task: str, arguments: Sequence[Any]) -> DictConfig:
    """What ``fairseq-train`` makes of its arguments, which takes it longer than a tiny training."""
    parser = options.get_training_parser(default_task=task)
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [str(part) for part in arguments]))


def write_checkpoint(
    path: Path,
    data: Path,
    arch: str,
    *flags: str,
    task: str = "language_modeling",
    change: Callable[[Any], None] | None = None,
) -> Path:
    """Write a checkpoint of a randomly initialised model as fairseq-train would; ``change`` may edit the model."""
    cfg = configuration(task, [data, "--task", task, "--arch", arch, *flags])
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    if change is not None:
        with torch.no_grad():
            change(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 0, "lr_scheduler_state": {}}],
        "task_state": {},
        "extra_state": {},
    }
    checkpoint_utils.torch_persistent_save(state, str(path))
    return path


def load(folder: Path, name: str) -> checkpoints.Checkpoint:
    """The checkpoint ``folder/name/model.pt`` as the analyses read it."""
    return checkpoints.load(str(folder / name / "model.pt"))


def make_unigram(model: Any, log_probs_V: torch.Tensor) -> None:
    """Edit a ``vanilla_lm`` with an untied output so that it gives these probabilities whatever it reads."""
    norm = model.decoder.core.norm if hasattr(model.decoder.core, "norm") else model.decoder.core.stack.norm
    norm.weight.zero_()
    norm.bias.zero_()
    norm.bias[0] = 1.0
    model.decoder.core.project.weight.zero_()
    model.decoder.core.project.weight[:, 0] = log_probs_V
