"""Training steps of the multi-scale models against fairseq's and Hugging Face's, over as many rows as fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from fairseq.utils import apply_to_sample
from torch import nn

from benchmarks.gpu.device import Device
from benchmarks.gpu.rows import PRECISIONS, Cell, NotInstalledError, Row, Table
from benchmarks.gpu.timing import QUICK, TRAINING_COLUMNS, Effort, training_numbers
from benchmarks.losses import LOSSES
from benchmarks.peers import (
    MULTISCALE,
    PAPER,
    TINY,
    Shape,
    build,
    fairseq_lm,
    huggingface_gpt2,
    multiscale,
    random_sample,
)
from benchmarks.training import FAIRSEQ, GPT2, VANILLA, label
from fairseq_ms.lm.registry import PRESETS

Builder = Callable[[Shape], nn.Module]
# Dropout everywhere, and the vocabulary: of BookCorpus (Multi-scale Transformer LMs, Table 1), then of WikiText-103.
BOOKS = replace(PAPER, vocabulary=31_300, dropout=0.1)
WIKITEXT = replace(PAPER, vocabulary=33_346, dropout=0.1, layers=16)
WIKITEXT_PRESETS = (
    "vanilla_lm_wt103_16",
    "retina_lm_wt103_16",
    "multiscale_topdown_wt103_6_12",
    "multiscale_topdown_wt103_5_10",
    "multiscale_bottomup_wt103_5_10",
)


def gpt2(shape: Shape) -> nn.Module:
    """Hugging Face's model; NotInstalledError without the package."""
    model = huggingface_gpt2(shape)
    if model is None:
        raise NotInstalledError("transformers")
    return model


def vanilla(shape: Shape) -> nn.Module:
    """Ours, whose attention is torch's flash attention on a GPU."""
    return cast(nn.Module, build("vanilla_lm", shape, decoder_layers=shape.layers))


def preset(name: str, shape: Shape) -> nn.Module:
    """A preset at a shape's sizes."""
    return cast(nn.Module, build(PRESETS[name].model, shape, **PRESETS[name].values))


PEERS: dict[str, Builder] = {FAIRSEQ: fairseq_lm, GPT2: gpt2}
OURS: dict[str, Builder] = {VANILLA: vanilla, **{name: partial(multiscale, name) for name in MULTISCALE}}


def tables(quick: bool) -> list[Table]:
    """BookCorpus' and WikiText-103's sizes; ``quick`` takes one preset of the latter's."""
    books, wikitext = (replace(TINY, length=20, dropout=0.1),) * 2 if quick else (BOOKS, WIKITEXT)
    # Sixteen layers take their time at any width.
    presets = WIKITEXT_PRESETS[1:2] if quick else WIKITEXT_PRESETS
    about = (
        f"Forward and backward over as many rows as fit, {Effort().most_rows} at most, gradients made anew. "
        "fairseq's and Hugging Face's models are measured with `cross_entropy` alone; "
        "attention of the vanilla model is dense flash attention. Ratios are of time a target, to fairseq's model in "
        "the same precision. {}"
    )
    return [
        _table("training", "Training at BookCorpus' sizes", about.format(_sizes(books)), books, OURS, quick),
        _table(
            "wikitext-103", "Training at WikiText-103's sizes", about.format(_sizes(wikitext)), wikitext,
            {name: partial(preset, name) for name in presets}, quick,
        ),
    ]  # fmt: skip


def _sizes(shape: Shape) -> str:
    return f"Sizes: {str(shape).removesuffix(', float32')}."


def _table(name: str, title: str, about: str, shape: Shape, ours: Mapping[str, Builder], quick: bool) -> Table:
    effort = QUICK if quick else Effort()
    both = [(model, "cross_entropy", build) for model, build in PEERS.items()]
    both += [(model, criterion, build) for model, build in ours.items() for criterion in LOSSES]
    rows = [
        Row(
            (label(model, shape), criterion, precision),
            partial(numbers, build=build, shape=shape, criterion=criterion, dtype=dtype, effort=effort),
            group=precision,
        )
        for precision, dtype in PRECISIONS.items()
        for model, criterion, build in both
    ]
    settings = ["model", "criterion", "precision"]
    return Table(name, title, about, settings, TRAINING_COLUMNS, rows, "time", label(FAIRSEQ, shape))


def numbers(
    device: Device, build: Builder, shape: Shape, criterion: str, dtype: torch.dtype, effort: Effort
) -> Mapping[str, Cell]:
    """A model's training steps."""
    model = build(shape).to(device.torch, dtype).train()

    def sample_of(rows: int) -> Any:
        return apply_to_sample(lambda tensor: tensor.to(device.torch), random_sample(shape, rows))

    return training_numbers(device, model, sample_of, LOSSES[criterion], effort)
