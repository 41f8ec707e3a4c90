"""The runs behind docs/claims.md, as data: what is trained, on which corpus, for how long, and how it is tested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Part:
    """What the runs of one paper have in common.

    Attributes:
        corpus: a name of `corpora.CORPORA`
        tokens: of an update
        epochs: over the corpus
        validations: of a run
        train: command of a training; {examples}, {data}, {save}, {seed}, {updates}, {interval} (updates between two
            validations), {warmup} (a twentieth of the updates), {long_warmup} (a third), {preset}, {cpu} (`--cpu`, or
            nothing on a GPU) and {hydra_cpu} (true or false) are filled in
        test: command of a test, with {checkpoint}, and {lengths} of a column
        result: regular expression of what the test prints
        metric: what that is
        hours: of one core that a whole run takes, roughly
        memory: whether its claims are about memory, so that its runs say what a training step keeps
    """

    corpus: str
    tokens: int
    epochs: int
    validations: int
    train: str
    test: str
    result: str
    metric: str
    hours: float
    memory: bool = False


@dataclass(frozen=True)
class Run:
    """A row of a table, for each of its seeds.

    Attributes:
        part: a name of `PARTS`
        name: of its folder and its results
        title: of its row
        preset: fills the training command's {preset}
        flags: further arguments of the training
        columns: of the table: title, and what fills the test's {lengths}; none where there is nothing to test
        share: of the corpus' updates
        after: the run whose last checkpoint this one begins with, and whose hours count as its own
        seeds: a training for each
        cost: times the part's hours
    """

    part: str
    name: str
    title: str
    preset: str = ""
    flags: str = ""
    columns: Sequence[tuple[str, str]] = (("test", ""),)
    share: float = 1.0
    after: str | None = None
    seeds: Sequence[int] = (1,)
    cost: float = 1.0

    @property
    def full_name(self) -> str:
        """part/run."""
        return f"{self.part}/{self.name}"

    @property
    def hours(self) -> float:
        """Of one core, for one seed, roughly."""
        return PARTS[self.part].hours * self.share * self.cost


_STREAMING = Part(
    *("words", 1024, 28, 28),
    "{examples}/transformer_ql/train.sh {preset} {data} {cpu} --num-workers 0 --log-format json "
    "--max-update {updates} --validate-interval-updates {interval} --save-interval-updates {interval} "
    "--keep-interval-updates 1 --seed {seed} --save-dir {save}",
    "{examples}/transformer_ql/evaluate.sh {checkpoint} {data} {lengths} {cpu}",
    r"Perplexity: *([0-9.]+)",
    "perplexity of words",
    hours=1.1,
)
_FAST = Part(
    *("some_subwords", 4 * 512, 1, 5),
    "fairseq-train {data} --user-dir {examples}/../fairseq_ms --task language_modeling {cpu} --num-workers 0 "
    "--criterion linear_cross_entropy --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 "
    "--decoder-attention-heads 4 --share-decoder-input-output-embed --tokens-per-sample 512 --batch-size 4 "
    "--optimizer adam --lr 0.006 --embedding-init-std 0.1 --dropout 0 --attention-dropout 0 "
    "--lr-scheduler cosine --warmup-updates {warmup} --clip-norm 1.0 "
    "--log-format json --max-update {updates} --validate-interval-updates {interval} "
    "--save-interval-updates {interval} --keep-interval-updates 1 --no-epoch-checkpoints --seed {seed} "
    "--save-dir {save}",
    "fairseq-eval-lm {data} --user-dir {examples}/../fairseq_ms --path {checkpoint} --gen-subset test "
    "--tokens-per-sample 512 --context-window 256 --batch-size 8 {cpu}",
    r"Perplexity: *([0-9.]+)",
    "perplexity of subwords",
    hours=0.25,
    memory=True,
)
_HIERARCHICAL = Part(
    *("characters", 2 * 1344, 1, 10),
    "{examples}/haed/train.sh characters_{preset} {data} dataset.batch_size=2 common.cpu={hydra_cpu} "
    "dataset.num_workers=0 common.log_format=json common.seed={seed} optimization.max_update={updates} "
    "dataset.validate_interval_updates={interval} checkpoint.save_interval_updates={interval} "
    "checkpoint.keep_interval_updates=1 checkpoint.save_dir={save} hydra.run.dir={save}/hydra",
    "{examples}/haed/evaluate.sh {checkpoint} {data} characters {cpu}",
    r"Loss \(base 2\): *([0-9.]+)",
    "bits per character",
    hours=0.7,
)
_WARM_UP = " ".join(f"optimizer.groups.{part}.lr_scheduler.warmup_updates={{warmup}}" for part in ("encoder", "main"))
_DECODER_WARM_UP = "optimizer.groups.decoder.lr_scheduler.warmup_updates={warmup}"


def _rows(part: Part, length: int, hours: float) -> Part:
    """The same with one longer row an update."""
    return replace(
        part,
        train=part.train.replace("sample 512 --batch-size 4", f"sample {length} --batch-size 1"),
        test=part.test.replace(
            "sample 512 --context-window 256 --batch-size 8",
            f"sample {length} --context-window {length // 2} --batch-size {4096 // length or 1}",
        ),
        tokens=max(length, 2048),
        hours=hours,
    )


PARTS = {
    # Tables 3 and 4 of "Multi-scale Transformer Language Models" at a sixth of the width, over a fifth of the novels,
    # and over all of them, so that context of more than a few tokens can come to count.
    "multiscale_fast": _FAST,
    "multiscale_long": replace(_FAST, corpus="subwords", validations=10, hours=1.0),
    # The recipes of docs/recipes.md, each with its own optimizer, positions and parts.
    "recipes": replace(_FAST, memory=False, hours=0.33),
    "recipes_2048": _rows(_FAST, 2048, 0.35),
    "recipes_8192": _rows(_FAST, 8192, 0.7),
    "recipes_long": replace(_FAST, corpus="subwords", validations=10, hours=1.4),
    # Table 1 of "Transformer-QL": Appendix E's recipe for SimpleBooks-2, as many epochs, less text, so that the models
    # overfit as the paper's do.
    "streaming": _STREAMING,
    # The other regime, of Table 2: the same models and recipe, but text that they see once, and less than half as many
    # updates; and at half the width.
    "plenty": replace(_STREAMING, corpus="many_words", epochs=1, validations=10, hours=0.9),
    "plenty_narrow": replace(_STREAMING, corpus="many_words", epochs=1, validations=10, hours=0.5),
    # Table 1 and Figures 2 to 4 of "Hierarchical Attention Encoder Decoder": Appendix B's recipe for characters, with
    # rows of 1,344 as there, but two of them an update and a shorter warm-up.
    "hierarchical": _HIERARCHICAL,
    # Three times the text in rows of four, with encoder and decoder of half the units.
    "hierarchical_long": replace(
        _HIERARCHICAL,
        corpus="many_characters",
        tokens=4 * 1344,
        train=_HIERARCHICAL.train.replace("batch_size=2", "batch_size=4 model.decoder_units=512"),
        hours=1.0,
    ),
}

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
    for rate in (0.003, 0.012):
        yield _today("vanilla", f"rotary_{rate}", f"{ROTARY} --lr {rate}", f"vanilla, Adam at {rate}")
    for shape, seeds in (
        ("vanilla", FIVE),
        ("retina", FIVE),
        ("topdown", FIVE),
        ("bottomup", THREE),
        ("window8", THREE),
        ("window64", THREE),
    ):
        yield _today(shape, "muon", MUON, seeds=seeds)
    for shape in ("vanilla", "retina", "bottomup", "topdown"):
        yield _today(shape, "muon_0.01", f"{MUON} --lr 0.01", f"{shape} at 0.01", seeds=THREE)
    yield _today("vanilla", "muon_0.01_init", f"{MUON} --lr 0.01 --init-std 0.09", "vanilla at 0.01, weights from 0.09")
    scaled = f"{MUON} --lr 0.01 --scale-embedding"
    yield _today("vanilla", "muon_0.01_scaled", scaled, "vanilla at 0.01, scaled")
    yield _today("vanilla", "muon_0.01_both", f"{scaled} --init-std 0.09", "vanilla at 0.01, scaled, weights from 0.09")
    for shape in ("vanilla", "retina"):
        for rate in (0.005, 0.04):
            yield _today(shape, f"muon_{rate}", f"{MUON} --lr {rate}", f"{shape} at {rate}")
    yield _today("vanilla", "today", TODAY)
    for shape in ("vanilla", "retina"):
        for layers in (4, 8):
            title = f"{shape}, {layers} layers"
            yield _today(shape, f"muon_{layers}", f"{MUON} --decoder-layers {layers}", title)
    for length in (2048, 8192):
        for shape in ("vanilla", "retina"):
            run = _today(shape, "muon", MUON, f"{shape}, rows of {length:,}", part=f"recipes_{length}")
            yield replace(run, flags=run.flags.replace("256:512", f"256:{length}"))
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


_WINDOWS = (("window 16", "4 12"), ("window 32", "8 24"))
_COMPRESSED = (("window 16", "4 6 6"), ("window 32", "8 12 12"))
_NO_MEMORY = (("window 16", "16 0"), ("window 32", "32 0"))
_QL, _XL = "transformer_ql_simplebooks2", "transformer_xl_simplebooks2"
_NARROW = "--decoder-embed-dim 128 --decoder-ffn-embed-dim 512"

STREAMING = [
    Run("plenty", "xl", "Transformer-XL", _XL, columns=_WINDOWS, share=0.5, seeds=THREE),
    Run("plenty", "ql", "Transformer-QL", _QL, columns=_WINDOWS, share=0.5, seeds=THREE),
    Run("plenty", "ql_no_droppath", "Transformer-QL without droppath", _QL, "--droppath 0", _WINDOWS, share=0.5),
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
