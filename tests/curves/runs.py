"""Small trainings that repeat exactly, through fairseq's own ``main``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from fairseq_cli.train import main

import fairseq_ms.models  # noqa: F401  (registers everything)
from tests.helpers.trained import configuration, write_corpus

UPDATES = 20
KEPT = Path(__file__).with_name("curves.json")

# Weights large enough for softmax and activations to be anything but linear from the first update on.
_INIT = {"init-std": 0.2}
_COMMON: dict[str, Any] = {**_INIT, "decoder-embed-dim": 24, "decoder-ffn-embed-dim": 40, "decoder-attention-heads": 4}
_STREAMING = {**_COMMON, "task": "streaming_language_modeling", "tokens-per-sample": 8, "mem-len": 6}
_CHUNKS: dict[str, Any] = {
    **_INIT,
    "separators": "w0 </s>",
    "max-segment-len": 4,
    "token-embed-dim": 6,
    "encoder-units": 16,
}
_CHUNKS |= {"decoder-embed-dim": 24, "decoder-units": 20, "dropout": 0.1}
_TRANSFORMER: dict[str, Any] = {
    "position-embed-dim": 8,
    "decoder-layers": 2,
    "decoder-ffn-embed-dim": 40,
    "attention-head-dim": 8,
}
_TRANSFORMER |= {"decoder-attention-heads": 3, "attention-dropout": 0.1}
_IEM = {"criterion": "in_batch_sampled_softmax", "negative-batches": 2}

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla_lm": ("vanilla_lm", {**_COMMON, "decoder-layers": 2}),
    "vanilla_lm, window": ("vanilla_lm", {**_COMMON, "decoder-layers": 2, "scale-windows": "1x=0:5"}),
    "vanilla_lm, linear_cross_entropy": (
        "vanilla_lm",
        {**_COMMON, "decoder-layers": 2, "criterion": "linear_cross_entropy"},
    ),
    "retina_lm": ("retina_lm", {**_COMMON, "decoder-layers": 2, "scale-windows": "1x=0:4,2x=4:8"}),
    "multiscale_topdown": ("multiscale_topdown", {**_COMMON, "scale-layers": "4x=1,2x=1,1x=1"}),
    "multiscale_bottomup": ("multiscale_bottomup", {**_COMMON, "scale-layers": "4x=1,2x=1,1x=1"}),
    "coarse_lm": ("coarse_lm", {**_COMMON, "scale-layers": "4x=2", "criterion": "bag_of_words"}),
    "transformer_xl": ("transformer_xl", {**_STREAMING, "decoder-layers": 2}),
    "compressive_transformer": (
        "compressive_transformer",
        {**_STREAMING, "decoder-layers": 2, "compressed-mem-len": 4, "compression-rate": 2},
    ),
    "transformer_ql": (
        "transformer_ql",
        {
            **_STREAMING,
            "scale-layers": "1x=1,2x=1",
            "output-layers": 1,
            "droppath": 0.3,
            "decoder-normalize-before": True,
        },
    ),
    "haed": ("haed", {**_CHUNKS, **_TRANSFORMER}),
    "haed, first phase": ("haed", {**_CHUNKS, **_TRANSFORMER, **_IEM}),
    "hred": ("hred", {**_CHUNKS, "main-units": 28}),
    "hred, first phase": ("hred", {**_CHUNKS, "main-units": 28, **_IEM}),
}
"""What is trained: the architecture, and flags that differ from ``train``'s."""


def corpus(folder: Path) -> Path:
    """Sentences of a small language in which words repeat what came before, binarised; the same on every Python."""
    rng = random.Random(7)  # Of its methods, only random() is promised to stay as it is.
    lines = []
    for _ in range(160):
        line: list[str] = []
        for _ in range(4 + int(rng.random() * 12)):
            line.append(line[-2] if len(line) > 1 and rng.random() < 0.5 else f"w{int(rng.random() ** 2 * 19)}")
        lines.append(" ".join(line))
    return write_corpus(folder, {"train": lines})


def flags_of(run: str) -> dict[str, Any]:
    """The flags of one of ``RUNS`` with those that all have."""
    return {"task": "language_modeling", "criterion": "cross_entropy", "tokens-per-sample": 24, **RUNS[run][1]}


def train(run: str, data: Path) -> dict[str, list[float]]:
    """``UPDATES`` updates of one of ``RUNS``: the loss in bits and the norm of the gradient at each, not rounded."""
    arch, flags = RUNS[run][0], flags_of(run)
    arguments = [str(data), "--arch", arch]
    for name, value in flags.items():
        arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    arguments += ["--batch-size", "4", "--optimizer", "adam", "--lr", "0.003", "--clip-norm", "1.0", "--seed", "3"]
    arguments += ["--max-update", str(UPDATES), "--cpu", "--num-workers", "0", "--log-format", "none"]
    arguments += ["--disable-validation", "--no-save", "--save-dir", str(data / "none")]
    cfg = configuration(flags["task"], arguments)

    curve: dict[str, list[float]] = {"loss": [], "gnorm": []}
    step = Trainer.train_step

    def noted(trainer: Trainer, *args: Any, **settings: Any) -> Any:
        with metrics.aggregate() as meters:
            logged = step(trainer, *args, **settings)
        for name, values in curve.items():
            values.append(float(meters[name].avg))
        return logged

    torch.set_num_threads(1)
    metrics.reset()
    Trainer.train_step = noted
    try:
        main(cfg)
    finally:
        Trainer.train_step = step
        metrics.reset()
    assert len(curve["loss"]) == UPDATES
    return curve
