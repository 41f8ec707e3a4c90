"""What long context costs: a training step and generation by length, every architecture beside dense attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fairseq.utils import apply_to_sample

from benchmarks.device import peak
from benchmarks.peers import FAIRSEQ, GPT2, LOSSES, VANILLA, Shape, build, build_model, random_sample
from benchmarks.table import DTYPES, GB, TIME, Cell, Options, Row, Table, Work, to
from benchmarks.training import COLUMNS, training_parity, training_work
from fairseq_ms.tools.training_step import training_sample

CPU = Shape(dim=252, ffn_dim=1008, heads=12, vocabulary=1000, layers=4)
GPU = Shape(dim=768, ffn_dim=3072, heads=12, vocabulary=31_300, layers=12)
TINY = Shape(dim=24, ffn_dim=48, heads=12, vocabulary=101, layers=4)
LOCAL, WINDOWS = "1x=0:64", "1x=0:64,16x=64:1024,64x=1024:8192"
TWO_WIDTHS = "1x=0:8*6,1x=0:248*6"
# These read a long text in segments.
STREAMS, SEGMENT = ("transformer_xl", "compressive_transformer", "transformer_ql"), 512
# Tokens generated after a text of the length.
NEW = 16
LOSS = "linear_cross_entropy"
PLAIN = f"{FAIRSEQ}, cross_entropy"


def models(shape: Shape) -> dict[str, tuple[str, dict[str, object]]]:
    """Architectures of equally many layers at 1x, or in all."""
    quarter = max(1, shape.layers // 4)
    stacks = f"64x={quarter},16x={quarter},4x={quarter},1x={quarter}"
    stream: dict[str, object] = {"decoder_normalize_before": True, "mem_len": SEGMENT}
    pieces = {"decoder_layers": shape.layers, **stream}
    return {
        "local": ("vanilla_lm", {"decoder_layers": shape.layers, "scale_windows": LOCAL}),
        "retina": ("retina_lm", {"decoder_layers": shape.layers, "scale_windows": WINDOWS}),
        "two widths": ("retina_lm", {"decoder_layers": shape.layers, "scale_windows": TWO_WIDTHS}),
        "topdown": ("multiscale_topdown", {"scale_layers": stacks}),
        "bottomup": ("multiscale_bottomup", {"scale_layers": stacks.removeprefix(f"64x={quarter},")}),
        "transformer_xl": ("transformer_xl", pieces),
        "compressive_transformer": ("compressive_transformer", {**pieces, "compressed_mem_len": SEGMENT // 2}),
        "transformer_ql": ("transformer_ql", {"scale_layers": f"1x={quarter},2x={quarter}", **stream}),
    }


def tables(options: Options) -> list[Table]:
    """A training step, then generation."""
    shape = TINY if options.quick else GPU if options.on_gpu else CPU
    lengths = (128, 256) if options.quick else (512, 2048, 8192, 32_768)
    names = [FAIRSEQ, VANILLA, *models(shape)]

    def rows(work: Callable[[str, Shape, str, Options], Work], chosen: list[str]) -> list[Row]:
        return [
            Row((name, str(length), precision), partial(work, name, replace(shape, length=length), precision, options),
                precision)
            for precision in options.precisions
            for length in lengths
            for name in chosen
        ]  # fmt: skip

    windows = f"windows {WINDOWS}, two widths {TWO_WIDTHS}, local {LOCAL}"
    what = f"{shape.layers} layers of {shape.dim}, {shape.heads} heads, no dropout; {windows}."
    about = (
        f"Forward and backward over one sequence of length T, `{LOSS}` unless a row says otherwise, GPT-2 with "
        f"`cross_entropy`; {what} "
        f"Streaming models read segments of {SEGMENT} with as much memory, one of which is measured."
    )
    then = f"{NEW} tokens by the core's `generate` after a text of T - {NEW}, the text's pass left out; {what}"
    ratios = {
        "to fairseq's": lambda settings: to(settings, model=FAIRSEQ),
        "to vanilla's": lambda settings: to(settings, model=VANILLA),
        f"to T = {lengths[0]}": lambda settings: to(settings, at1=str(lengths[0])),
    }
    settings = ["model", "T", "precision"]
    columns = {TIME: "ms a token", "peak": "peak, GB"}
    steps, tokens = rows(step_work, [PLAIN, GPT2, *names]), rows(generation_work, names[1:])
    later = {heading: base for heading, base in ratios.items() if heading != "to fairseq's"}
    return [
        Table("growth", "Training by length", about, settings, COLUMNS, steps, 1e6, ratios, training_parity),
        Table("growth-generation", "Generation by length", then, settings, columns, tokens, 1e3, later),
    ]


def step_work(name: str, shape: Shape, precision: str, options: Options) -> Work:
    """A training step over a sequence, or over a segment after a full memory."""
    loss = LOSSES["cross_entropy" if name in (PLAIN, GPT2) else LOSS]
    model = _model(name, shape).to(options.device, DTYPES[precision]).train()
    if name == GPT2:
        sample: Any = apply_to_sample(lambda tensor: tensor.to(options.device), random_sample(shape, 1))
    else:
        sample = training_sample(model, 1, model.decoder.core.segment_len if name in STREAMS else shape.length)
    return training_work(model, sample, loss, options)


def generation_work(name: str, shape: Shape, precision: str, options: Options) -> Work:
    """Tokens after a text that was read before, each time from where it ended."""
    model = _model(name, shape).to(options.device, DTYPES[precision]).eval()
    core = model.decoder.core
    text = torch.randint(4, shape.vocabulary, (1, shape.length - NEW), generator=torch.Generator().manual_seed(0))
    text = text.to(options.device)
    state: Any = core.new_state(1, shape.length)
    with torch.no_grad():
        read = text[:, :-1]
        for part in read.split(SEGMENT, dim=1) if name in STREAMS else [read]:
            state = core(part, state)[1]

    ready: list[Any] = []

    def before() -> None:
        ready[:] = [state.copy()]

    def generate(state: Any) -> None:
        core.generate(text[:, -1:], NEW, 0.7, 10, state=state)

    def others() -> Mapping[str, Cell]:
        return {"peak": peak(lambda: generate(state.copy()), options) / GB}

    return Work(lambda: generate(ready[0]), NEW, others, before)


def _model(name: str, shape: Shape) -> Any:
    if name in (FAIRSEQ, PLAIN, VANILLA, GPT2):
        return build_model(name.removesuffix(", cross_entropy"), shape)
    arch, flags = models(shape)[name]
    return build(arch, replace(shape, length=min(SEGMENT, shape.length)) if name in STREAMS else shape, **flags)
