"""A training step of a model, on random tokens: its loss, what it keeps for its backward pass, and its time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import TypedDict

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.models import FairseqLanguageModel
from torch import Tensor, nn

from fairseq_ms.analysis import checkpoints
from fairseq_ms.analysis.saved_bytes import saved_bytes
from fairseq_ms.core.ops.device import peak_bytes, wait_for


class Sample(TypedDict):
    """A batch as fairseq's trainer hands it to a criterion."""

    net_input: dict[str, object]
    target: Tensor
    ntokens: int


def training_sample(model: FairseqLanguageModel, batch: int, tokens: int, seed: int = 1) -> Sample:
    """Random tokens (B, T) as fairseq's trainer hands them over; a streaming model's memory is filled before."""
    generator = torch.Generator().manual_seed(seed)
    symbols = len(model.decoder.dictionary)
    device = next(model.parameters()).device
    source = torch.randint(4, symbols, (batch, tokens), generator=generator).to(device)
    target = torch.randint(4, symbols, (batch, tokens), generator=generator).to(device)
    net_input: dict[str, object] = {"src_tokens": source}
    if checkpoints.is_streaming(model):
        net_input["memory"] = _full_memory(model, source)
    return {"net_input": net_input, "target": target, "ntokens": batch * tokens}


def training_loss(model: FairseqLanguageModel, sample: Sample) -> Tensor:
    """The summed loss of a sample, as fairseq's cross_entropy or adaptive_loss computes it."""
    kind = CrossEntropyCriterion if getattr(model.decoder, "adaptive_softmax", None) is None else AdaptiveLoss
    return kind(SimpleNamespace(target_dictionary=model.decoder.dictionary), False)(model, sample)[0]


@torch.no_grad()
def _full_memory(model: FairseqLanguageModel, source_BT: Tensor) -> object:
    """A streaming model's memory when it grows no further."""
    memory, size = None, -1
    while True:
        memory = model(source_BT, memory=memory)[1]["memory"]
        grown = sum(tensor.numel() for tensor in _tensors(memory))
        if grown <= size or grown == 0:
            return memory
        size = grown


def _tensors(memory: object) -> Iterator[Tensor]:
    """All tensors in a memory, which is made of tensors, sequences, dictionaries and dataclasses."""
    if isinstance(memory, Tensor):
        yield memory
    elif isinstance(memory, dict | list | tuple):
        for part in memory.values() if isinstance(memory, dict) else memory:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(memory) and not isinstance(memory, type):
        for field in dataclasses.fields(memory):
            yield from _tensors(getattr(memory, field.name))


def step_bytes(model: FairseqLanguageModel, batch: int, tokens: int) -> int:
    """Bytes that a training step on (B, T) tokens keeps for its backward pass.

    More than two samples are not run: each further one keeps as much as the second does.
    """
    model.train()
    few = []
    for samples in range(1, min(batch, 2) + 1):
        few.append(saved_bytes(partial(training_loss, model, training_sample(model, samples, tokens)), model))
    return few[0] + (batch - 1) * (few[-1] - few[0])


def cuda_peak(model: FairseqLanguageModel, batch: int, tokens: int) -> int | None:
    """torch.cuda.max_memory_allocated of a training step without optimizer, the paper's own measure; None on a CPU."""
    model.train()
    sample = training_sample(model, batch, tokens)
    peak = peak_bytes(next(model.parameters()).device, lambda: training_loss(model, sample).backward())
    model.zero_grad(set_to_none=True)
    return peak


def mixed_precision_peak(model: FairseqLanguageModel, batch: int, tokens: int) -> int | None:
    """``cuda_peak`` of the model in half precision, as --fp16 runs it and in which it stays; None on a CPU."""
    peak_bytes(next(model.parameters()).device, model.half)
    return cuda_peak(model, batch, tokens)


def seconds(model: FairseqLanguageModel, batch: int, tokens: int, repeats: int = 3) -> float:
    """The shortest of several forward and backward passes on random tokens (B, T), after one to warm up."""
    model.train()
    device = next(model.parameters()).device
    sample = training_sample(model, batch, tokens)
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        training_loss(model, sample).backward()
        wait_for(device)
        taken.append(time.perf_counter() - began)
    model.zero_grad(set_to_none=True)
    return min(taken[1:])


def forward_seconds(module: nn.Module, x: Tensor, repeats: int = 5) -> float:
    """The shortest of several forward passes over x, in training mode, after one to warm up."""
    module.train()
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        module(x)
        wait_for(x.device)
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
