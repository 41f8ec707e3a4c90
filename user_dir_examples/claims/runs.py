"""The runs behind docs/claims.md, as data: what is trained in each part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from parts import Run

ROTARY = "--positions rotary"
MUON = f"{ROTARY} --optimizer muon --lr 0.02 --adam-lr 0.006"
TODAY = f"{ROTARY} --norm rms --activation-fn swiglu --qk-norm --no-bias --optimizer muon --lr 0.02 --adam-lr 0.006"


def _topdown(name: str, layers: str) -> tuple[str, str]:
    scales = ",".join(f"{scale}={count}" for scale, count in zip(("64x", "16x", "4x", "1x"), layers.split(",")))
    return f"{name} {scales}", f"--arch multiscale_topdown --scale-layers {scales}"


# Titles and flags.
SHAPES = {
    "vanilla": ("vanilla, 6 layers", "--arch vanilla_lm --decoder-layers 6"),
    "retina": (
        "retina, 6 layers",
        "--arch retina_lm --decoder-layers 6 --scale-heads 1x=2,4x=1,16x=1 --scale-windows 1x=0:8,4x=8:256,16x=256:512",
    ),
    "retina64": (
        "retina, 6 layers, fine to 64",
        "--arch retina_lm --decoder-layers 6 --scale-heads 1x=2,4x=1,16x=1 "
        "--scale-windows 1x=0:64,4x=64:256,16x=256:512",
    ),
    "topdown": _topdown("top-down", "3,3,4,4"),
    "topdown_coarse": _topdown("top-down", "8,8,8,2"),
    "topdown_1166": _topdown("top-down", "1,1,6,6"),
    "topdown_5522": _topdown("top-down", "5,5,2,2"),
    "bottomup": (
        "bottom-up 16x=3,4x=4,1x=4",
        "--arch multiscale_bottomup --scale-layers 16x=3,4x=4,1x=4",
    ),
    "window8": ("vanilla, 6 layers, window of 8", "--arch vanilla_lm --decoder-layers 6 --scale-windows 1x=0:8"),
    "window64": ("vanilla, 6 layers, window of 64", "--arch vanilla_lm --decoder-layers 6 --scale-windows 1x=0:64"),
}
# What they choose otherwise, by the end of their names.
OTHERWISE = {
    "_clip": "clipped at 0.25",
    "_scaled": "embeddings scaled",
    "_weights": "weights from 0.09",
    "_init": "scaled, weights from 0.09",
    "_postln": "post-LN",
    "_0.002": "at 0.002",
    "_0.002_postln": "at 0.002, post-LN",
}
# The parts of today, one at a time.
EACH_PART = {
    "rms": "--norm rms",
    "swiglu": "--activation-fn swiglu",
    "qknorm": "--qk-norm",
    "nobias": "--no-bias",
    "residual": "--init-residual scaled",
    "postln": "--decoder-normalize-after",
}
# What the runs with learned positions are called.
LEARNED = {"vanilla": "vanilla6", "topdown": "topdown_even"}
THREE, FIVE = (1, 2, 3), (1, 2, 3, 4, 5)


def _learned(part: str, shape: str, seeds: Sequence[int] = (1,), more: str = "", name: str = "") -> Run:
    """A multi-scale model as in the paper: learned positions, Adam."""
    title, flags = SHAPES[shape]
    title += f", {OTHERWISE[name]}" if name else ""
    return Run(part, LEARNED.get(shape, shape) + name, title, "", f"{flags} {more}".strip(), seeds=seeds)


def _today(
    shape: str,
    name: str,
    choices: str,
    title: str = "",
    seeds: Sequence[int] = (1,),
    part: str = "recipes",
    **other: float,
) -> Run:
    """A multi-scale model with the parts or the optimizer of docs/recipes.md."""
    gate = " --aggregation-gate" if shape == "bottomup" else ""
    flags = f"{SHAPES[shape][1]}{gate} {choices}"
    return Run(part, f"{shape}_{name}", title or f"{SHAPES[shape][0]} {choices}", "", flags, seeds=seeds, **other)  # type: ignore[arg-type]


def _recipes() -> Iterator[Run]:
    """Rotary positions and Muon: what tells most first."""
    yield _today("vanilla", "rotary", ROTARY)
    scaled = f"{ROTARY} --scale-embedding --init-std 0.09"
    yield _today("vanilla", "rotary_init", scaled, "vanilla, Adam, scaled, weights from 0.09")
    for shape, seeds in (
        ("vanilla", FIVE),
        ("retina", FIVE),
        ("topdown", FIVE),
        ("bottomup", THREE),
        ("window8", THREE),
        ("window64", THREE),
    ):
        yield _today(shape, "muon", MUON, seeds=seeds)
    for shape in ("vanilla", "retina", "bottomup", "topdown", "window64", "retina64"):
        yield _today(shape, "muon_0.01", f"{MUON} --lr 0.01", f"{shape} at 0.01", seeds=THREE)
    for name, part in EACH_PART.items():
        yield _today("vanilla", f"muon_0.01_{name}", f"{MUON} --lr 0.01 {part}", f"vanilla at 0.01, {part}")
    yield _today("vanilla", "muon_0.01_init", f"{MUON} --lr 0.01 --init-std 0.09", "vanilla at 0.01, weights from 0.09")
    scaled = f"{MUON} --lr 0.01 --scale-embedding"
    yield _today("vanilla", "muon_0.01_scaled", scaled, "vanilla at 0.01, scaled")
    yield _today("vanilla", "muon_0.01_both", f"{scaled} --init-std 0.09", "vanilla at 0.01, scaled, weights from 0.09")
    for shape in ("vanilla", "retina"):
        yield _today(shape, "muon_0.005", f"{MUON} --lr 0.005", f"{shape} at 0.005")
    yield _today("vanilla", "today", TODAY)
    for shape in ("vanilla", "retina"):
        for layers in (4, 8):
            title = f"{shape}, {layers} layers"
            yield _today(shape, f"muon_{layers}", f"{MUON} --decoder-layers {layers}", title)
    for length in (2048, 8192):
        for shape in ("vanilla", "retina"):
            run = _today(shape, "muon", MUON, f"{shape}, rows of {length:,}", part=f"recipes_{length}")
            yield replace(run, flags=run.flags.replace("256:512", f"256:{length}"))
    for shape in ("window64", "retina64", "retina", "vanilla"):
        title = f"{shape} at 0.01, rows of 2,048"
        run = _today(shape, "muon_0.01", f"{MUON} --lr 0.01", title, THREE, "recipes_2048")
        yield replace(run, flags=run.flags.replace("256:512", "256:2048"))
    for shape in ("topdown_1166", "topdown_5522"):
        yield _today(shape, "muon", MUON, seeds=THREE)


def _multiscale() -> Iterator[Run]:
    """Learned positions and Adam."""
    for shape, seeds in (
        ("vanilla", FIVE),
        ("retina", FIVE),
        ("topdown_coarse", FIVE),
        ("topdown", (1,)),
        ("bottomup", (1,)),
    ):
        yield _learned("multiscale_fast", shape, seeds)
    for shape in ("vanilla", "topdown_coarse", "retina"):
        yield _learned("multiscale_long", shape)
    yield _learned("multiscale_fast", "vanilla", (1,), "--scale-embedding", "_scaled")
    yield _learned("multiscale_fast", "vanilla", (1,), "--init-std 0.09", "_weights")
    for shape in ("vanilla", "retina", "topdown_coarse", "bottomup"):
        yield _learned("multiscale_fast", shape, THREE, "--scale-embedding --init-std 0.09", "_init")
    for shape in ("vanilla", "bottomup"):
        yield _learned("multiscale_fast", shape, THREE, "--clip-norm 0.25", "_clip")
    yield _learned("multiscale_fast", "window8")
    for name in ("_postln", "_0.002", "_0.002_postln"):
        flags = f"{'--lr 0.002 ' * ('0.002' in name)}{'--decoder-normalize-after' * ('post' in name)}"
        yield _learned("multiscale_fast", "vanilla", more=flags, name=name)


_WINDOWS = (("window 16", "4 12"), ("window 32", "8 24"))
_COMPRESSED = (("window 16", "4 6 6"), ("window 32", "8 12 12"))
_NO_MEMORY = (("window 16", "16 0"), ("window 32", "32 0"))
_QL, _XL = "transformer_ql_simplebooks2", "transformer_xl_simplebooks2"
_MUON = "--optimizer muon --lr 0.01 --adam-lr 0.003 --warmup-updates {warmup} --clip-norm 1.0"
_LOCAL = f"--arch vanilla_lm --decoder-layers 8 --decoder-embed-dim 256 --decoder-ffn-embed-dim 1024 {ROTARY} {_MUON}"
_NARROW = "--decoder-embed-dim 128 --decoder-ffn-embed-dim 512"

STREAMING = [
    Run("plenty", "xl", "Transformer-XL", _XL, columns=_WINDOWS, share=0.5, seeds=THREE),
    Run("plenty", "ql", "Transformer-QL", _QL, columns=_WINDOWS, share=0.5, seeds=THREE),
    Run("plenty", "ql_no_droppath", "Transformer-QL without droppath", _QL, "--droppath 0", _WINDOWS, share=0.5),
    Run("plenty", "xl_muon", "Transformer-XL, Muon", _XL, _MUON, _WINDOWS, share=0.5),
    Run("plenty", "ql_muon", "Transformer-QL, Muon, no droppath", _QL, f"{_MUON} --droppath 0", _WINDOWS, share=0.5),
    Run("plenty_rows", "window64", "vanilla, window of 64, Muon", "", f"{_LOCAL} --scale-windows 1x=0:64", share=0.5),
    Run("plenty_narrow", "xl", "Transformer-XL", _XL, _NARROW, _WINDOWS, share=0.5, seeds=THREE),
    Run("plenty_narrow", "ql", "Transformer-QL", _QL, _NARROW, _WINDOWS, share=0.5, seeds=THREE),
    Run("streaming", "xl", "Transformer-XL", _XL, columns=_WINDOWS, seeds=THREE),
    Run("streaming", "ql", "Transformer-QL", _QL, columns=_WINDOWS, seeds=THREE),
    Run("streaming", "ql_no_droppath", "Transformer-QL without droppath", _QL, "--droppath 0", _WINDOWS),
    Run("streaming", "xl_dropout", "Transformer-XL with dropout 0.3", _XL, "--dropout 0.3", _WINDOWS),
    Run(
        *("streaming", "compressive", "Compressive Transformer", "compressive_transformer_simplebooks2", ""),
        *(_COMPRESSED,),
        cost=3,
    ),
    Run("streaming", "ms", "MS-Transformer", f"{_QL}_ms", "", _NO_MEMORY),
]


_WARM_UP = " ".join(f"optimizer.groups.{part}.lr_scheduler.warmup_updates={{warmup}}" for part in ("encoder", "main"))
_DECODER_WARM_UP = "optimizer.groups.decoder.lr_scheduler.warmup_updates={warmup}"


def _hierarchical() -> Iterator[Run]:
    def run(name: str, title: str, preset: str, settings: str = "", part: str = "hierarchical", **other: Any) -> Run:
        more = [settings, *([] if preset == "hred" else [_WARM_UP])]
        more += [] if preset in ("hred", "iem") else [_DECODER_WARM_UP]
        if preset in ("iem", "finetune"):
            # The paper's 2,000 updates are about a third of each phase, and with less the first phase collapses.
            more = [setting.replace("{warmup}", "{long_warmup}") for setting in more]
        columns = () if preset == "iem" else (("test", ""),)
        return Run(part, name, title, preset, " ".join(filter(None, more)), columns, **other)

    long = "hierarchical_long"
    yield run("hred", "HRED", "hred", "model.encoder_units=512", long)
    yield run("hred_transformer", "HRED with transformer", "hred_transformer", "model.encoder_units=512", long)
    yield run("haed", "HAED", "haed", "", long)
    yield run("hred", "HRED", "hred")
    yield run("hred_transformer", "HRED with transformer", "hred_transformer")
    yield run("haed", "HAED", "haed")
    yield run("haed_rotary", "HAED, rotary positions", "haed", "model.positions=rotary")
    yield run("encoder64", "LSTM encoder of 64 units", "hred_transformer", "model.encoder_units=64")
    yield run("decoder256", "HAED, decoder of 256 units", "haed", "model.decoder_units=256")
    yield run("end_to_end", "end to end, decoder of 2,000 units", "end_to_end")
    # The first phase takes as long as 0.1 of the updates end to end.
    yield run("end_to_end_as_long", "end to end, for as long as both phases", "end_to_end", share=0.6)
    yield run("iem", "first phase", "iem", share=0.5)
    yield run("finetune", "first phase, then end to end", "finetune", share=0.5, after="iem")


# Most informative first, which is the order in which the driver takes them.
RUNS = [
    *_recipes(),
    *_multiscale(),
    *(_today(shape, "muon", MUON, part="recipes_long") for shape in ("vanilla", "retina", "topdown")),
    *STREAMING,
    *_hierarchical(),
]
