"""Training steps of the streaming models: beside TransfoXL, at Transformer-QL's sizes, and against context."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from benchmarks.gpu.device import Device
from benchmarks.gpu.rows import GB, PRECISIONS, Cell, NotInstalledError, Row, Table
from benchmarks.gpu.timing import QUICK, TRAINING_COLUMNS, Effort, leave, seconds, training_numbers
from benchmarks.streaming import PAPER, PEER, ROWS, TINY, Steps
from fairseq_ms.analysis import untrained
from fairseq_ms.analysis.plot import context_growth
from fairseq_ms.analysis.training_step import training_loss, training_sample
from fairseq_ms.lm.registry import PRESETS

# Symbols of the data sets (Transformer-QL, Table 4).
VOCABULARY = {"simplebooks92": 98_304, "wt103": 267_735}
SMALL = ["--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2"]
SMALL += ["--adaptive-input-cutoff", "20,40", "--adaptive-softmax-cutoff", "20,40"]
XL = "transformer_xl"
# Streams of a step, and their width, as in docs/results.md.
STREAMS, DIM = 8, 256


def presets() -> list[str]:
    """Those of Transformer-QL that are 1,536 wide."""
    return [name for name, preset in PRESETS.items() if preset.values.get("decoder_embed_dim") == 1536]


def tables(quick: bool) -> list[Table]:
    """Three tables."""
    return [_beside_transfo_xl(quick), _wide(quick), _context(quick)]


def _beside_transfo_xl(quick: bool) -> Table:
    names = (XL, "compressive_transformer", "transformer_ql", PEER)
    size = TINY if quick else PAPER
    rows = [
        Row(
            (name, f"{dropout:g}", precision),
            partial(step_numbers, name=name, dropout=dropout, dtype=dtype, quick=quick),
            group=f"{dropout}, {precision}",
        )
        for precision, dtype in PRECISIONS.items()
        for dropout in (0.0, 0.1)
        for name in names
    ]
    about = (
        f"{size.layers} layers of {size.dim}, segment and memory {size.length}, batch {ROWS}, pre-LN, forward and "
        f"backward without the output layer. Ratios are to `{XL}`."
    )
    columns = {"time": "ms a step", "kept": "MB kept", "peak": "peak, GB"}
    return Table("streaming", "Streaming models", about, ["model", "dropout", "precision"], columns, rows, "time", XL)


def step_numbers(device: Device, name: str, dropout: float, dtype: torch.dtype, quick: bool) -> Mapping[str, Cell]:
    """A step of one of the models of `fairseq-ms bench streaming`."""
    size = TINY if quick else PAPER
    steps = Steps(type(size)(**{**vars(size), "dropout": dropout}), device.torch, dtype)
    if name not in steps.names():
        raise NotInstalledError("transformers 4.35, the last with TransfoXL")
    leave(module for other in steps.names() if (module := steps.module(other)) is not steps.module(name))

    def run() -> None:
        steps.step(name)

    peak = device.peak(run)
    taken = seconds(device, run, QUICK if quick else Effort())
    return {"time": [1e3 * value for value in taken], "kept": steps.kept(name) / 1e6, "peak": peak / GB}


def _wide(quick: bool) -> Table:
    effort = QUICK if quick else Effort()
    rows = [
        Row((name, precision), partial(preset_numbers, name=name, dtype=dtype, effort=effort, quick=quick))
        for precision, dtype in PRECISIONS.items()
        for name in presets()
        if not quick or "simplebooks92" in name
    ]
    about = (
        "The presets that are 1,536 wide, with their segments and dropout, full memories, adaptive softmax over the "
        "symbols of SimpleBooks-92 (98,304) and WikiText-103 (267,735)."
    )
    return Table("transformer-ql", "Training at Transformer-QL's sizes", about, ["preset", "precision"],
                 TRAINING_COLUMNS, rows)  # fmt: skip


def preset_numbers(device: Device, name: str, dtype: torch.dtype, effort: Effort, quick: bool) -> Mapping[str, Cell]:
    """Training steps of a preset on streams whose memories are full."""
    data = next(data for data in VOCABULARY if data in name)
    cfg = untrained.parse(["--arch", name, *(SMALL if quick else [])])
    tokens = int(cast(int, PRESETS[name].values["tokens_per_sample"]))
    model = untrained.build_model(cfg, 97 if quick else VOCABULARY[data]).to(device.torch, dtype).train()

    def sample_of(rows: int) -> Any:
        return training_sample(model, rows, tokens)

    def loss_of(module: nn.Module, sample: Any) -> torch.Tensor:
        return training_loss(module, sample)

    return training_numbers(device, model, sample_of, loss_of, effort)


def _context(quick: bool) -> Table:
    rows = [
        Row(
            (name, str(segment), precision),
            partial(context_numbers, name=name, segment=segment, dtype=dtype, quick=quick),
            group=f"{segment}, {precision}",
        )
        for precision, dtype in PRECISIONS.items()
        for segment in ((4,) if quick else (4, 16, 64))
        for name in context_growth.MODELS
    ]
    about = (
        f"As `fairseq-ms plot context`: d = {DIM}, {STREAMS} streams a step, numbers a stream (Transformer-QL, "
        "Section 2.4). Ratios are to Transformer-XL at the same segment."
    )
    columns = {"context": "context, tokens", "time": "ms", "kept": "MB kept"}
    settings = ["model", "segment = memory", "precision"]
    return Table(
        "context", "What context costs", about, settings, columns, rows, "time", next(iter(context_growth.MODELS))
    )


def context_numbers(device: Device, name: str, segment: int, dtype: torch.dtype, quick: bool) -> Mapping[str, Cell]:
    """Context, time and bytes of a model at one window."""
    dim, streams = (64, 2) if quick else (DIM, STREAMS)
    step = context_growth.Step(context_growth.MODELS[name], segment, dim, streams, device.torch, dtype)
    taken = seconds(device, step.run, QUICK if quick else Effort())
    return {
        "context": step.context,
        "time": [1e3 * value / streams for value in taken],
        "kept": step.kept() / streams / 1e6,
    }
