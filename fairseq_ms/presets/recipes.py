"""Presets of no paper: models for long texts, those that docs/models.md measures (`_tiny`), and others like them.

The others have about 10 (`_small`) and 100 million parameters (`_base`), with 8,000 and 32,000 symbols, and HAED with
characters.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fairseq_ms.presets import haed, transformer_ql  # noqa: F401  (the papers' presets come first)
from fairseq_ms.presets.registry import PRESETS, Preset, Recipe, Settings, Values, register_presets

SOURCE = "the presets of docs/models.md"


@dataclass(frozen=True)
class _Size:
    """What the presets of one size have in common.

    Attributes:
        retina: its windows
        rows, warmup: of an update, and how many updates of warm-up
        half: whether it is for a GPU
        scales: layers of the top-down and of the bottom-up model
        length: tokens of a row
        tested: whether docs/models.md has results of models of this size
    """

    label: str
    dim: int
    heads: int
    layers: int
    retina: str
    rows: int
    warmup: int
    half: bool
    scales: tuple[str, str] = ("", "")
    length: int = 512
    tested: bool = False


_TINY, _SMALL = ("64x=3,16x=3,4x=4,1x=4", "16x=3,4x=4,1x=4"), ("64x=2,16x=2,4x=2,1x=3", "16x=2,4x=3,1x=4")
_BASE = ("64x=2,16x=2,4x=3,1x=3", "16x=3,4x=3,1x=4")
_SIZES = {
    "tiny": _Size("as measured", 128, 4, 6, "1x=0:64*3,16x=64:512*1", 4, 50, False, _TINY, tested=True),
    "small": _Size("small model", 256, 8, 10, "1x=0:64*6,16x=64:512*2", 4, 50, False, _SMALL),
    "base": _Size("base model", 768, 12, 12, "1x=0:64*9,16x=64:512*3", 64, 500, True, _BASE),
}
# Half of the heads see the nearest tokens, half so many that a cache is a tenth of the text; the window beside it,
# which all heads have, is as large. benchmarks/windows.py measures which windows pay.
LONG = "long texts"
_LONG = {
    "2048": (_Size(LONG, 144, 8, 4, "1x=0:8*4,1x=0:376*4", 2, 50, False, length=2048, tested=True), "1x=0:192"),
    "8192": (_Size(LONG, 512, 8, 8, "1x=0:8*4,1x=0:1528*4", 4, 500, True, length=8192), "1x=0:768"),
}
# The width of `_tiny`, its rate of AdamW and the deviation of its embeddings.
_MEASURED = (128, 0.006, 0.1)


def _text(size: _Size) -> Recipe:
    """Muon and AdamW over one epoch; AdamW's rate is in proportion to 1 / width.

    Post-LN where it was measured: the file alone says so, since it does not train with Adam.
    """
    width, rate, _ = _MEASURED
    model: Values = {}
    notes = "The rate falls over one epoch: --data DATA writes as many updates as DATA has batches, and --max-update "
    notes += "another number; above 4 passes over DATA, model.dropout is 0.1."
    if size.dim == width:
        model = {"decoder_normalize_after": True}
        notes += " With another optimizer than Muon add model.decoder_normalize_after=false."
    if not size.tested:
        notes += " Rates and warm-up are those of a model of 2 M parameters, and untested at this size."
    notes += " Without a GPU add common.bf16=false." * size.half
    return Recipe(
        SOURCE,
        {
            "common": {"bf16": True} if size.half else {},
            "model": model,
            "task": {"_name": "language_modeling", "tokens_per_sample": size.length, "sample_break_mode": "none"},
            "dataset": {"batch_size": size.rows},
            "criterion": {"_name": "linear_cross_entropy"},
            "optimization": {"max_update": "???", "lr": [0.01], "clip_norm": 1.0},
            "optimizer": {"_name": "muon", "adam_lr": round(rate * width / size.dim, 4)},
            "lr_scheduler": {"_name": "cosine", "warmup_updates": size.warmup},
        },
        notes,
    )


def _shared(size: _Size) -> Values:
    """Of all models of text; embeddings begin with logits as large as those of the models that were measured."""
    width, _, deviation = _MEASURED
    return {
        "positions": "rotary",
        "embedding_init_std": round(deviation * (width / size.dim) ** 0.5, 2),
        "share_decoder_input_output_embed": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "decoder_embed_dim": size.dim,
        "decoder_ffn_embed_dim": 4 * size.dim,
        "decoder_attention_heads": size.heads,
    }


def _models(size: _Size) -> Iterator[tuple[str, Values, Recipe]]:
    shared, layers, (topdown, bottomup) = _shared(size), {"decoder_layers": size.layers}, size.scales
    yield "vanilla_lm", {**shared, **layers}, _text(size)
    yield "retina_lm", {**shared, **layers, "scale_windows": size.retina}, _text(size)
    yield "multiscale_topdown", {**shared, "scale_layers": topdown}, _text(size)
    yield "multiscale_bottomup", {**shared, "scale_layers": bottomup, "aggregation_gate": True}, _text(size)
    if size.dim != _MEASURED[0]:
        yield "transformer_ql", *_streams(size)
        yield "haed", *_characters(size)


def _streams(size: _Size) -> tuple[Values, Recipe]:
    """Appendix E's line for SimpleBooks-2, but long segments, and no droppath, which claims.md has at a loss."""
    paper = PRESETS["transformer_ql_simplebooks2"]
    values = {**paper.values, "tokens_per_sample": 64, "mem_len": 64, "droppath": 0.0}
    if size.half:
        values |= {"scale_layers": "1x=4,2x=4", "decoder_embed_dim": 768, "decoder_ffn_embed_dim": 3072}
        values["decoder_attention_heads"] = 12
    settings: Settings = {
        **paper.recipe.settings,
        "dataset": {"batch_size": 4 * size.rows},
        "optimization": {**paper.recipe.settings["optimization"], "max_update": 10_000},
    }
    notes = "Adam, rates and dropout are those of Appendix E for SimpleBooks-2; nothing else has been measured. "
    return values, Recipe(SOURCE, settings, f"{notes}{paper.recipe.notes}")


def _characters(size: _Size) -> tuple[Values, Recipe]:
    """Appendix A's rates and sizes; a small model with rows and warm-up of the runs in claims.md."""
    paper = PRESETS["haed_wt103"]
    values: Values = {}
    settings = dict(paper.recipe.settings)
    notes = f"Rates are those of Appendix A, for characters. {paper.recipe.notes}"
    if size.half:
        values = {
            "encoder_units": 768,
            "decoder_embed_dim": 868,
            "decoder_layers": 8,
            "decoder_ffn_embed_dim": 3472,
            "decoder_attention_heads": 12,
            "attention_head_dim": 64,
            "decoder_units": 2000,
        }
        notes += " They are untested at this size."
    else:
        rates = {"encoder": haed.FAST, "main": haed.SLOW, "decoder": haed.FAST}
        settings |= {"dataset": {"batch_size": 2}, "optimizer": haed.composite(rates, 40)}
    return values, Recipe(SOURCE, settings, notes)


def _long() -> Iterator[Preset]:
    """A retina, full attention and a window, in all of which attention knows the tokens just before it."""
    for name, (size, window) in _LONG.items():
        parts = {"short_conv": 3, "qk_norm": "scaled", "decoder_layers": size.layers}
        shared = {**_shared(size), **parts}
        models = {"retina_lm_long": size.retina, "vanilla_lm_long": None, "vanilla_lm_window": window}
        for model, windows in models.items():
            values = shared if windows is None else {**shared, "scale_windows": windows}
            yield Preset(f"{model}_{name}", model.rpartition("_")[0], LONG, values, _text(size))


register_presets(_long())
register_presets(
    Preset(f"{model}_{name}", model, size.label, values, recipe)
    for name, size in _SIZES.items()
    for model, values, recipe in _models(size)
)
