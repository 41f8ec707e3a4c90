"""Sampling through fairseq's own generator, and Hugging Face's for GPT-2 (Multi-scale Transformer LMs, Table 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks.generate import (
    CONTESTANTS,
    NEW_TOKENS,
    PREFIX,
    TEMPERATURE,
    TOP_K,
    HuggingFaceSampler,
    Sampler,
    random_prefix,
    sampled_model,
)
from benchmarks.gpu.device import Device
from benchmarks.gpu.rows import GB, PRECISIONS, Cell, Row, Table
from benchmarks.gpu.timing import QUICK, Effort, seconds
from benchmarks.gpu.training import BOOKS, gpt2
from benchmarks.peers import TINY, Shape
from benchmarks.training import FAIRSEQ, GPT2, label

BATCHES = (1, 8, 64)
EFFORT = Effort(rounds=3, least_seconds=0.0)


def tables(quick: bool) -> list[Table]:
    """Every model at every batch size in both precisions."""
    shape = TINY if quick else replace(BOOKS, dropout=0.0)
    new_tokens = 8 if quick else NEW_TOKENS
    rows = [
        Row(
            (label(name, shape), str(batch), precision),
            partial(numbers, name=name, shape=shape, batch=batch, dtype=dtype, new_tokens=new_tokens, quick=quick),
            group=f"{precision}, {batch}",
        )
        for precision, dtype in PRECISIONS.items()
        for batch in ((2,) if quick else BATCHES)
        for name in (FAIRSEQ, *CONTESTANTS, GPT2)
    ]
    about = (
        f"A prefix of {PREFIX} tokens and {new_tokens} sampled ones (top {TOP_K}, temperature {TEMPERATURE:g}), models "
        "as in training, V = 31,300. Ratios are to fairseq's model at the same batch size and precision."
    )
    columns = {"sequence": "s a sequence", "token": "ms a step", "peak": "peak, GB"}
    settings = ["model", "batch", "precision"]
    return [
        Table("generation", "Generation", about, settings, columns, rows, "sequence", label(FAIRSEQ, shape)),
    ]


def numbers(
    device: Device, name: str, shape: Shape, batch: int, dtype: torch.dtype, new_tokens: int, quick: bool
) -> Mapping[str, Cell]:
    """Time and memory of a batch of sequences."""
    model: nn.Module = gpt2(shape) if name == GPT2 else sampled_model(name, shape)
    model = model.to(device.torch, dtype)
    sampler = (HuggingFaceSampler if name == GPT2 else partial(Sampler, shape=shape))(model, new_tokens=new_tokens)
    prefix = random_prefix(shape, batch).to(device.torch)

    def run() -> None:
        torch.manual_seed(3)
        sampler(prefix)

    peak = device.peak(run)
    taken = seconds(device, run, QUICK if quick else EFFORT)
    return {
        "sequence": [value / batch for value in taken],
        "token": 1e3 * taken[0] / new_tokens,
        "peak": peak / GB,
    }
