"""What a training step keeps for its backward pass, measured."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import options
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from torch import Tensor, nn

from fairseq_ms.analysis import checkpoints
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.errors import UsageError
from fairseq_ms.models.streaming import StreamingLanguageModel
from fairseq_ms.models.vocabulary import validate_cutoffs


def build(flags: Sequence[str], vocabulary: int, on_meta: bool = False) -> tuple[Any, Any]:
    """Model and configuration of fairseq's flags (``--arch ...``) over a dictionary of so many symbols.

    No data is read; on the meta device, the weights take no memory. Raises UsageError on flags that fairseq
    does not know or that do not fit together.
    """
    cfg = parse(flags)
    return build_model(cfg, vocabulary, on_meta), cfg


def parse(flags: Sequence[str]) -> Any:
    """Configuration of fairseq's flags (``--arch ...``); raises UsageError on flags that fairseq does not know."""
    if not any(flag == "--arch" or flag.startswith("--arch=") for flag in flags):
        raise UsageError("--arch must name an architecture: got none (or give a checkpoint with --path)")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parser = options.get_training_parser(default_task=_task_of(flags))
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


def build_model(cfg: Any, vocabulary: int, on_meta: bool = False) -> Any:
    """The model of a configuration over a dictionary of so many symbols."""
    task = TASK_REGISTRY[cfg.task._name](cfg.task, _dictionary(vocabulary))
    validate_cutoffs(cfg.model, vocabulary)
    with torch.device("meta" if on_meta else "cpu"):
        return task.build_model(cfg.model)


def _dictionary(vocabulary: int) -> Dictionary:
    dictionary = Dictionary()
    if vocabulary <= len(dictionary):
        raise UsageError(f"--vocabulary must be more than the {len(dictionary)} special symbols: got {vocabulary}")
    for number in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def training_sample(model: Any, batch: int, tokens: int, seed: int = 1) -> dict[str, Any]:
    """Random tokens (B, T) as fairseq's trainer hands them over; a streaming model's memory is filled before."""
    generator = torch.Generator().manual_seed(seed)
    symbols = len(model.decoder.dictionary)
    device = next(model.parameters()).device
    source = torch.randint(4, symbols, (batch, tokens), generator=generator).to(device)
    target = torch.randint(4, symbols, (batch, tokens), generator=generator).to(device)
    net_input = {"src_tokens": source}
    if checkpoints.is_streaming(model):
        net_input["memory"] = _full_memory(model, source)
    return {"net_input": net_input, "target": target, "ntokens": batch * tokens}


def training_loss(model: Any, sample: dict[str, Any]) -> Tensor:
    """The summed loss of a sample, as fairseq's cross_entropy or adaptive_loss computes it."""
    kind = CrossEntropyCriterion if getattr(model.decoder, "adaptive_softmax", None) is None else AdaptiveLoss
    return kind(SimpleNamespace(target_dictionary=model.decoder.dictionary), False)(model, sample)[0]


@torch.no_grad()
def _full_memory(model: Any, source_BT: Tensor) -> Any:
    """A streaming model's memory when it grows no further."""
    memory, size = None, -1
    while True:
        memory = model(source_BT, memory=memory)[1]["memory"]
        grown = sum(tensor.numel() for tensor in _tensors(memory))
        if grown <= size or grown == 0:
            return memory
        size = grown


def _tensors(memory: Any) -> Iterator[Tensor]:
    """All tensors in a memory, which is made of tensors, sequences, dictionaries and dataclasses."""
    if isinstance(memory, Tensor):
        yield memory
    elif isinstance(memory, dict | list | tuple):
        for part in memory.values() if isinstance(memory, dict) else memory:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(memory):
        for field in dataclasses.fields(memory):
            yield from _tensors(getattr(memory, field.name))


def step_bytes(model: Any, batch: int, tokens: int) -> int:
    """Bytes that a training step on (B, T) tokens keeps for its backward pass.

    More than two samples are not run: each further one keeps as much as the second does.
    """
    model.train()
    few = []
    for samples in range(1, min(batch, 2) + 1):
        sample = training_sample(model, samples, tokens)
        few.append(saved_bytes(lambda sample=sample: training_loss(model, sample), model))  # type: ignore[misc]
    return few[0] + (batch - 1) * (few[-1] - few[0])


def cuda_peak(model: Any, batch: int, tokens: int) -> int:
    """torch.cuda.max_memory_allocated of a training step without optimizer: the paper's own measure."""
    model.train()
    device = next(model.parameters()).device
    sample = training_sample(model, batch, tokens)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    training_loss(model, sample).backward()
    torch.cuda.synchronize(device)
    model.zero_grad(set_to_none=True)
    return int(torch.cuda.max_memory_allocated(device))


def forward_seconds(module: nn.Module, x: Tensor, repeats: int = 5) -> float:
    """The shortest of several forward passes over x, in training mode, after one to warm up."""
    module.train()
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        module(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def weight_bytes(parameters: int, element: int) -> dict[str, float]:
    """Bytes of weights, gradients and Adam's state; in half precision Adam keeps single precision copies."""
    copies = 4 if element == 2 else 0
    return {
        "weights": float(element * parameters),
        "gradients": float(element * parameters),
        "Adam": float((8 + copies) * parameters),
    }
