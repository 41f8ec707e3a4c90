"""The runs behind docs/claims.md, as data: what is trained, on which corpus, for how long, and how it is tested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


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

    @property
    def full_name(self) -> str:
        """part/run."""
        return f"{self.part}/{self.name}"


_STREAMING = Part(
    *("words", 1024, 28, 28),
    "{examples}/transformer_ql/train.sh {preset} {data} {cpu} --num-workers 0 --log-format json "
    "--max-update {updates} --validate-interval-updates {interval} --save-interval-updates {interval} "
    "--keep-interval-updates 1 --seed {seed} --save-dir {save}",
    "{examples}/transformer_ql/evaluate.sh {checkpoint} {data} {lengths} {cpu}",
    r"Perplexity: *([0-9.]+)",
    "perplexity of words",
)
_MULTISCALE = Part(
    *("subwords", 16 * 512, 1, 10),
    "fairseq-train {data} --user-dir {examples}/../fairseq_ms --task language_modeling {cpu} --num-workers 0 "
    "--criterion linear_cross_entropy --decoder-embed-dim 256 --decoder-ffn-embed-dim 1024 "
    "--decoder-attention-heads 4 --share-decoder-input-output-embed --tokens-per-sample 512 --batch-size 16 "
    "--optimizer adam --lr 0.002 --lr-scheduler cosine --warmup-updates {warmup} --clip-norm 1.0 "
    "--log-format json --max-update {updates} --validate-interval-updates {interval} "
    "--save-interval-updates {interval} --keep-interval-updates 1 --no-epoch-checkpoints --seed {seed} "
    "--save-dir {save}",
    "fairseq-eval-lm {data} --user-dir {examples}/../fairseq_ms --path {checkpoint} --gen-subset test "
    "--tokens-per-sample 512 --context-window 256 --batch-size 8 {cpu}",
    r"Perplexity: *([0-9.]+)",
    "perplexity of subwords",
    memory=True,
)
# Half that width, without dropout and at half the rate, over a fifth of the novels: for one core.
_SMALL = replace(
    _MULTISCALE,
    corpus="some_subwords",
    tokens=4 * 512,
    validations=5,
    train=_MULTISCALE.train.replace("embed-dim 256", "embed-dim 128")
    .replace("embed-dim 1024", "embed-dim 512")
    .replace("--batch-size 16", "--batch-size 4")
    .replace("--lr 0.002", "--lr 0.001 --dropout 0 --attention-dropout 0"),
)
# The same at six times the rate, which embeddings with a standard deviation of 0.1 allow.
_FAST = replace(_SMALL, train=_SMALL.train.replace("--lr 0.001", "--lr 0.006 --embedding-init-std 0.1"))
_WARM_UP = " ".join(f"optimizer.groups.{part}.lr_scheduler.warmup_updates={{warmup}}" for part in ("encoder", "main"))
_DECODER_WARM_UP = "optimizer.groups.decoder.lr_scheduler.warmup_updates={warmup}"

PARTS = {
    # Table 1 of "Transformer-QL": Appendix E's recipe for SimpleBooks-2, as many epochs, less text, so that the models
    # overfit as the paper's do.
    "streaming": _STREAMING,
    # The other regime, of Table 2: the same models and recipe, but text that they see once, and less than half as many
    # updates.
    "plenty": replace(_STREAMING, corpus="many_words", epochs=1, validations=10),
    # Tables 3 and 4 of "Multi-scale Transformer Language Models", at a third of the width.
    "multiscale": _MULTISCALE,
    "multiscale_small": _SMALL,
    "multiscale_fast": _FAST,
    # The same over five times as much text, so that context of more than a few tokens can come to count.
    "multiscale_long": replace(_FAST, corpus="subwords", validations=10),
    # The recipes of docs/recipes.md, each with its own optimizer, positions and parts.
    "recipes": replace(_FAST, memory=False),
    # The same with a row of four times as many tokens an update.
    "recipes_2048": replace(
        _FAST,
        train=_FAST.train.replace("--tokens-per-sample 512 --batch-size 4", "--tokens-per-sample 2048 --batch-size 1"),
        test=_FAST.test.replace(
            "--tokens-per-sample 512 --context-window 256 --batch-size 8",
            "--tokens-per-sample 2048 --context-window 1024 --batch-size 2",
        ),
    ),
    # Table 1 and Figures 2 to 4 of "Hierarchical Attention Encoder Decoder": Appendix B's recipe for characters, with
    # rows of 1,344 as there, but two of them an update and a shorter warm-up.
    "hierarchical": Part(
        *("characters", 2 * 1344, 1, 10),
        "{examples}/haed/train.sh characters_{preset} {data} dataset.batch_size=2 common.cpu={hydra_cpu} "
        "dataset.num_workers=0 common.log_format=json common.seed={seed} optimization.max_update={updates} "
        "dataset.validate_interval_updates={interval} checkpoint.save_interval_updates={interval} "
        "checkpoint.keep_interval_updates=1 checkpoint.save_dir={save} hydra.run.dir={save}/hydra",
        "{examples}/haed/evaluate.sh {checkpoint} {data} characters {cpu}",
        r"Loss \(base 2\): *([0-9.]+)",
        "bits per character",
    ),
}


_WINDOWS = (("window 16", "4 12"), ("window 32", "8 24"))
_COMPRESSED = (("window 16", "4 6 6"), ("window 32", "8 12 12"))
_NO_MEMORY = (("window 16", "16 0"), ("window 32", "32 0"))
_QL, _XL = "transformer_ql_simplebooks2", "transformer_xl_simplebooks2"

STREAMING = [
    Run("streaming", "xl", "Transformer-XL", _XL, columns=_WINDOWS, seeds=(1, 2)),
    Run("streaming", "ql", "Transformer-QL", _QL, columns=_WINDOWS, seeds=(1, 2)),
    Run("streaming", "ql_no_droppath", "Transformer-QL without droppath", _QL, "--droppath 0", _WINDOWS),
    Run("streaming", "xl_dropout", "Transformer-XL with dropout 0.3", _XL, "--dropout 0.3", _WINDOWS),
    Run("streaming", "compressive", "Compressive Transformer", "compressive_transformer_simplebooks2", "", _COMPRESSED),
    Run("streaming", "ms", "MS-Transformer", f"{_QL}_ms", "", _NO_MEMORY),
    Run("plenty", "xl", "Transformer-XL", _XL, columns=_WINDOWS, share=0.5, seeds=(1, 2)),
    Run("plenty", "ql", "Transformer-QL", _QL, columns=_WINDOWS, share=0.5, seeds=(1, 2)),
    Run("plenty", "ql_no_droppath", "Transformer-QL without droppath", _QL, "--droppath 0", _WINDOWS, share=0.5),
]


def _multiscale(part: str) -> Iterator[Run]:
    # Seeds where the margins of the verdicts are.
    twice = ("vanilla6", "topdown_coarse", "retina", "window8") if part == "multiscale_fast" else ()

    def run(name: str, title: str, flags: str) -> Run:
        return Run(part, name, title, "", flags, seeds=(1, 2) if name in twice else (1,))

    for layers in (4, 6, 8):
        yield run(f"vanilla{layers}", f"vanilla, {layers} layers", f"--arch vanilla_lm --decoder-layers {layers}")
    for name, scales in (
        ("fine", "64x=1,16x=2,4x=4,1x=6"),
        ("even", "64x=3,16x=3,4x=4,1x=4"),
        ("coarse", "64x=8,16x=8,4x=8,1x=2"),
    ):
        yield run(f"topdown_{name}", f"top-down {scales}", f"--arch multiscale_topdown --scale-layers {scales}")
    scales = "16x=3,4x=4,1x=4"
    yield run("bottomup", f"bottom-up {scales}", f"--arch multiscale_bottomup --scale-layers {scales}")
    retina = "--arch retina_lm --scale-heads 1x=2,4x=1,16x=1 --scale-windows 1x=0:8,4x=8:256,16x=256:512"
    yield run("retina", "retina, 6 layers", f"{retina} --decoder-layers 6")
    for window in (8, 16, 64, 128, 256):
        near = f"--arch vanilla_lm --decoder-layers 6 --scale-windows 1x=0:{window}"
        yield run(f"window{window}", f"vanilla, 6 layers, window of {window}", near)


# The models of the claims.
LONG = ("vanilla6", "topdown_even", "topdown_coarse", "retina", "window8")


_ROTARY = "--positions rotary"
_MUON = "--optimizer muon --lr 0.02 --adam-lr 0.006"
_TODAY = f"{_ROTARY} --norm rms --activation-fn swiglu --qk-norm --no-bias"
_SHAPES = {
    "vanilla": "--arch vanilla_lm --decoder-layers 6",
    "retina": "--arch retina_lm --decoder-layers 6 --scale-heads 1x=2,4x=1,16x=1 "
    "--scale-windows 1x=0:8,4x=8:256,16x=256:512",
    "topdown": "--arch multiscale_topdown --scale-layers 64x=3,16x=3,4x=4,1x=4",
    "bottomup": "--arch multiscale_bottomup --scale-layers 16x=3,4x=4,1x=4 --aggregation-gate",
}


def _recipes() -> Iterator[Run]:
    for shape, flags in _SHAPES.items():
        for name, choices in {"rotary": _ROTARY, "muon": f"{_ROTARY} {_MUON}", "today": f"{_TODAY} {_MUON}"}.items():
            seeds = (1, 2) if name == "muon" and shape in ("vanilla", "retina") else (1,)
            yield Run("recipes", f"{shape}_{name}", f"{shape} {choices}", "", f"{flags} {choices}", seeds=seeds)
    for shape in ("vanilla", "retina"):
        flags = f"{_SHAPES[shape]} {_ROTARY} {_MUON}"
        for rate in (0.01, 0.04):
            yield Run("recipes", f"{shape}_muon_{rate}", f"{shape} at {rate}", "", f"{flags} --lr {rate}")
        for layers in (4, 8):
            deep = f"{flags} --decoder-layers {layers}"
            yield Run("recipes", f"{shape}_muon_{layers}", f"{shape}, {layers} layers", "", deep)
        long = flags.replace("16x=256:512", "16x=256:2048")
        yield Run("recipes_2048", f"{shape}_muon", f"{shape}, rows of 2,048", "", long)


def _hierarchical() -> Iterator[Run]:
    def run(name: str, title: str, preset: str, settings: str = "", **other: str | float) -> Run:
        more = [settings, *([] if preset == "hred" else [_WARM_UP])]
        more += [] if preset in ("hred", "iem") else [_DECODER_WARM_UP]
        if preset in ("iem", "finetune"):
            # The paper's 2,000 updates are about a third of each phase, and with less the first phase collapses.
            more = [setting.replace("{warmup}", "{long_warmup}") for setting in more]
        columns = () if preset == "iem" else (("test", ""),)
        return Run("hierarchical", name, title, preset, " ".join(filter(None, more)), columns, **other)  # type: ignore[arg-type]

    yield run("hred", "HRED", "hred")
    yield run("hred_transformer", "HRED with transformer", "hred_transformer")
    yield run("haed", "HAED", "haed")
    for units in (64, 512):
        yield run(
            f"encoder{units}", f"LSTM encoder of {units} units", "hred_transformer", f"model.encoder_units={units}"
        )
    for units in (256, 512):
        yield run(f"decoder{units}", f"HAED, decoder of {units} units", "haed", f"model.decoder_units={units}")
    yield run("end_to_end", "end to end, decoder of 2,000 units", "end_to_end")
    # The first phase takes as long as 0.1 of the updates end to end.
    yield run("end_to_end_as_long", "end to end, for as long as both phases", "end_to_end", share=0.6)
    yield run("iem", "first phase", "iem", share=0.5)
    yield run("finetune", "first phase, then end to end", "finetune", share=0.5, after="iem")


RUNS = [
    *STREAMING,
    *_multiscale("multiscale"),
    *_multiscale("multiscale_small"),
    *_multiscale("multiscale_fast"),
    *(run for run in _multiscale("multiscale_long") if run.name in LONG),
    *_recipes(),
    *_hierarchical(),
]
