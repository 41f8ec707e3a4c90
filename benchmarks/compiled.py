"""Training steps as they are and compiled, at two lengths, and what the first compiled step costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.device import peak
from benchmarks.peers import PAPER, TINY, VANILLA, Shape, build_model, label
from benchmarks.table import DTYPES, GB, TIME, Cell, Options, Row, Table, Work, to

MODELS = (VANILLA, "retina 12", "topdown 7,7,8,8")
EAGER, COMPILED = "eager", "compiled"
# As many tokens at every length.
TOKENS = {"cpu": 1024, "cuda": 32_768}


def work(name: str, shape: Shape, how: str, precision: str, options: Options) -> Work:
    """Forward and backward of the core's model on random tokens; compiling is part of no round."""
    model: Any = build_model(name, shape)
    core = model.decoder.core.to(options.device, DTYPES[precision]).train()
    rows = max(1, (2 * shape.length if options.quick else TOKENS[options.device]) // shape.length)
    size = (rows, shape.length + 1)
    tokens = torch.randint(4, shape.vocabulary, size, generator=torch.Generator().manual_seed(0)).to(options.device)

    def run() -> None:
        core.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        core.zero_grad(set_to_none=True)

    first = 0.0
    if how == COMPILED:
        torch.compiler.reset()
        # Tiny shapes show that everything runs, without a minute of code generation a row.
        core.compile(**({"backend": "aot_eager"} if options.quick else {}))
        began = time.perf_counter()
        run()
        first = time.perf_counter() - began

    def others() -> Mapping[str, Cell]:
        return {"rows": rows, "first": first or "", "peak": peak(run, options) / GB}

    return Work(run, rows * shape.length, others)


def tables(options: Options) -> list[Table]:
    """Three models at 512 and 4,096 tokens, each beside itself."""
    shapes = [TINY, replace(TINY, length=130)] if options.quick else [replace(PAPER, length=n) for n in (512, 4096)]
    shapes = [replace(shape, vocabulary=31_300) for shape in shapes] if options.on_gpu and not options.quick else shapes
    precision = options.precisions[0]
    rows = [
        Row(
            (label(name, shape), str(shape.length), how, precision),
            partial(work, name, shape, how, precision, options),
            f"{name}, {shape.length}",
        )
        for shape in shapes
        for name in MODELS
        for how in (EAGER, COMPILED)
    ]
    about = (
        f"Forward and backward of the core's `loss` over {TOKENS[options.device]:,} tokens; {shapes[0]}, and "
        f"T={shapes[-1].length}. The first step of a compiled model is the one that compiles it."
    )
    columns = {TIME: "us a target", "rows": "rows", "first": "first step, s", "peak": "peak, GB"}
    ratios = {"to eager": partial(to, at2=EAGER)}
    settings = ["model", "T", "how", "precision"]
    return [Table("compiled", "Compiled training", about, settings, columns, rows, 1e6, ratios)]
