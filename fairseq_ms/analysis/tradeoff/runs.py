"""Perplexity against the memory or time of training, over many runs (Section 5.1, Figure 3)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fairseq_ms.analysis import checkpoints, memory_formula, memory_measured, report, scoring
from fairseq_ms.analysis.checkpoints import Checkpoint
from fairseq_ms.errors import UsageError


def find_runs(folders: Sequence[str], file: str) -> list[tuple[str, Path]]:
    """(label, checkpoint) of every run below the folders; UsageError when a folder holds none."""
    found = []
    for folder in folders:
        paths = sorted(Path(folder).glob(f"**/{file}"))
        if not paths:
            raise UsageError(f"RUNS must be a folder with runs: no {file} lies below {folder}")
        found += [(str(path.parent.relative_to(folder)), path) for path in paths]
    return [(Path(path).resolve().parent.name if label == "." else label, path) for label, path in found]


def layers_of(cfg: Any) -> str:
    """How many layers a model has, as the figure writes it beside a point: coarsest scale first."""
    text = getattr(cfg, "scale_layers", None)
    if text is None:
        return str(getattr(cfg, "decoder_layers", ""))
    counts = dict(item.strip().split("x=") for item in text.split(","))
    return ",".join(counts[scale] for scale in sorted(counts, key=int, reverse=True))


def training_seconds(model: Any, batch: int, tokens: int, repeats: int = 3) -> float:
    """The shortest of several forward and backward passes on random tokens (B, T), after one to warm up."""
    model.train()
    device = next(model.parameters()).device
    sample = memory_measured.training_sample(model, batch, tokens)
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        memory_measured.training_loss(model, sample).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    model.zero_grad(set_to_none=True)
    return min(seconds[1:])


def measure(checkpoint: Checkpoint, split: str, limit: int | None, batch: int, max_tokens: int) -> dict[str, Any]:
    """Perplexity of a run on a split, and what a training step of it costs, as a dictionary.

    Bytes are those kept for backward, and together with weights, gradients and Adam's state; both are also
    given per scored target, as seconds are, so that models which score other numbers of targets compare.
    """
    nll = scoring.score_documents(
        checkpoint, checkpoints.documents(checkpoint, split, limit), max_tokens=max_tokens
    ).mean()
    model, tokens = checkpoint.model, checkpoint.segment
    kept = memory_measured.step_bytes(model, batch, tokens)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = memory_measured.weight_bytes(parameters, next(model.parameters()).element_size())
    seconds = training_seconds(model, batch, tokens)
    model.eval()
    return {
        "label": checkpoint.label,
        "arch": memory_formula.architecture(checkpoint.cfg.model),
        "layers": layers_of(checkpoint.cfg.model),
        "nll": float(nll),
        "perplexity": math.exp(nll),
        "parameters": parameters,
        "kept_bytes": kept,
        "total_bytes": kept + sum(weights.values()),
        "kept_bytes_per_target": kept / (batch * tokens),
        "seconds_per_target": seconds / (batch * tokens),
        "seconds": seconds,
    }


def draw(figure: Any, runs: Sequence[dict[str, Any]], cost: str) -> None:
    """One line an architecture, its runs in order of cost, the number of layers beside each point."""
    axes = figure.add_subplot()
    key, unit, label = {
        "memory": ("total_bytes", 1e9, "memory of a training step (GB)"),
        "time": ("seconds", 1.0, "forward and backward of a training step (s)"),
    }[cost]
    for number, arch in enumerate(dict.fromkeys(run["arch"] for run in runs)):
        own = sorted((run for run in runs if run["arch"] == arch), key=lambda run: run[key])
        costs, heights = [run[key] / unit for run in own], [run["perplexity"] for run in own]
        axes.plot(costs, heights, label=arch, **report.line_style(number))
        for x, y, run in zip(costs, heights, own):
            axes.annotate(run["layers"], (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.margins(0.12)
    report.finish_axes(axes, label, "perplexity")
