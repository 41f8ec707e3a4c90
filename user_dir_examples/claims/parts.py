"""The parts of the runs behind docs/claims.md, as data: on which corpus, for how long, and how they are tested."""

from __future__ import annotations

from collections.abc import Sequence
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
    "recipes": replace(_FAST, memory=False, hours=0.22),
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
    # The same text and tokens an update for a model without a memory.
    "plenty_rows": replace(
        _FAST,
        corpus="many_words",
        tokens=1024,
        validations=10,
        train=_FAST.train.replace("--batch-size 4", "--batch-size 2"),
        memory=False,
        metric=_STREAMING.metric,
        hours=0.9,
    ),
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
