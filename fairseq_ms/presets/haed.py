"""Presets of "Hierarchical Attention Encoder Decoder" (HAED), and its runs in two phases."""

from collections.abc import Mapping
from dataclasses import dataclass

from fairseq_ms.presets.registry import Preset, Recipe, Values, register_configs, register_presets


@dataclass(frozen=True)
class _Data:
    """One of the paper's two data sets, with what every preset for it sets."""

    label: str
    rows: Values
    values: Values
    note: str


_DATA = {
    "wt103": _Data(
        "WikiText-103's characters",
        {"tokens_per_sample": 1344, "sample_break_mode": "none"},
        {},
        "A row is about 256 words, as an image is 256 chunks.",
    ),
    "imagenet32": _Data(
        "the pixels of 32 x 32 images",
        {"tokens_per_sample": 3072, "sample_break_mode": "eos"},
        {"segmentation": "fixed"},
        "A row is one image, beginning with the end of a line.",
    ),
}

# Learning rate, at first and at the end (HAED, Appendix A).
FAST, SLOW = (0.002, 0.0001), (0.00035, 0.0000175)

# Sizes of the parts (HAED, Appendix A): the defaults of the flags, spelled out.
_ENCODER = {"mlp": {"encoder_units": 256}, "lstm": {"encoder_units": 1024}}
_MAIN = {
    "transformer": {
        "position_embed_dim": 100,
        "decoder_layers": 6,
        "decoder_ffn_embed_dim": 1424,
        "decoder_attention_heads": 8,
        "attention_head_dim": 32,
    },
    "lstm": {"main_units": 1500},
}

# Appendix B.
_LARGE = {"decoder_attention_heads": 12, "decoder_units": 2000}
_BASELINE = "the baseline, which is trained end to end throughout"

# Model, name after that of the data, where the paper reports it, and what differs from the model's defaults. Figures 2
# and 3 are drawn without a table of their sizes; these are the powers of two they span.
_ROWS: list[tuple[str, str, str, Values]] = [
    ("hred", "", "Table 1", {}),
    ("hred", "_transformer", "Table 1", {"main": "transformer"}),
    # The cross in Figure 2 is haed itself.
    ("hred", "_transformer_encoder_16", "Figure 2", {"main": "transformer", "encoder_units": 16}),
    ("hred", "_transformer_encoder_64", "Figure 2", {"main": "transformer", "encoder_units": 64}),
    ("hred", "_transformer_encoder_256", "Figure 2", {"main": "transformer", "encoder_units": 256}),
    ("hred", "_transformer_encoder_1024", "Figure 2", {"main": "transformer", "encoder_units": 1024}),
    ("haed", "", "Figure 2, the cross", {}),
    ("haed", "_decoder_128", "Figure 3", {"decoder_units": 128}),
    ("haed", "_decoder_256", "Figure 3", {"decoder_units": 256}),
    ("haed", "_decoder_512", "Figure 3", {"decoder_units": 512}),
    ("haed", "_decoder_1024", "Figure 3", {"decoder_units": 1024}),
    ("haed", "_decoder_2048", "Figure 3", {"decoder_units": 2048}),
    # All three runs of Figure 4; by this name, the first phase.
    ("haed", "_iem", "Figure 4, first phase", _LARGE),
    ("haed", "_megabyte", "beyond the paper, the shape of MEGABYTE", {"decoder": "transformer", "decoder_units": 512}),
]

# The runs of Table 1 and Figures 2 and 4: data and run name them, not the preset, of which Figure 4 has three.
_RUN_DATA = {"characters": "wt103", "pixels": "imagenet32"}
_RUNS: list[tuple[str, str, str, Values]] = [
    ("hred", "hred", "Table 1", {}),
    ("hred_transformer", "hred", "Table 1", {"main": "transformer"}),
    ("haed", "haed", "Figure 2, the cross", {}),
    ("iem", "haed", "Figure 4, first phase", _LARGE),
    ("finetune", "haed", "Figure 4, second phase", _LARGE),
    ("end_to_end", "haed", f"Figure 4, {_BASELINE}", _LARGE),
]


def _recipe(data: _Data, model: str, values: Values, phase: str) -> Recipe:
    """``phase`` is "end_to_end", "iem", the first phase, or "finetune", the second."""
    main = str(values.get("main", "lstm" if model == "hred" else "transformer"))
    encoder = "lstm" if model == "hred" else "mlp"
    rates = {"encoder": FAST, "main": FAST if main == "lstm" else SLOW, "decoder": FAST}
    criterion: Values = {"_name": "cross_entropy"}
    if phase == "iem":
        del rates["decoder"]
        criterion = {"_name": "in_batch_sampled_softmax", "negative_batches": 3}
    # "2000 steps of linear warm-up for the transformer based experiments" (Appendix A).
    warmup = 0 if main == "lstm" else 2000
    notes = [
        data.note,
        "Each part has a learning rate of its own: fairseq's composite optimizer, by the parameters' groups, which "
        "with common.fp16=true needs to see them one by one (fp16_no_flatten_grads). The paper trains for one epoch, "
        "over which the rates fall: --data DATA writes as many updates as DATA has batches.",
    ]
    # Section 4.2.
    half = {"iem": "first", "finetune": "second"}.get(phase, "")
    if half:
        notes.append(f"The phases see different text: task.data is the {half} half of the training data.")
    checkpoint: dict[str, str] = {}
    if phase == "finetune":
        checkpoint = {"finetune_from_model": "???"}
        notes.append(
            "checkpoint.finetune_from_model is checkpoint_last.pt of the first phase: an absolute path, since hydra "
            "runs every job in a folder of its own."
        )
    return Recipe(
        'Appendix A of "Hierarchical Attention Encoder Decoder"',
        {
            "common": {"fp16_no_flatten_grads": True},
            "checkpoint": checkpoint,
            "task": {"_name": "language_modeling", **data.rows},
            "dataset": {"batch_size": 32, "batch_size_valid": 8},
            "criterion": criterion,
            "optimization": {"max_update": "???", "clip_norm": 0.01, "lr": [FAST[0]]},
            "optimizer": composite(rates, warmup),
            "lr_scheduler": {"_name": "pass_through"},
            "model": {
                "segmentation": "words",
                "max_segment_len": 12,
                "encoder": encoder,
                **_ENCODER[encoder],
                "main": main,
                "decoder_embed_dim": 356,
                **_MAIN[main],
                "decoder": "lstm",
                "decoder_units": 1024,
            },
        },
        " ".join(notes),
        half,
    )


def composite(rates: Mapping[str, tuple[float, float]], warmup: int) -> Values:
    """An optimizer with a rate for each part of the model, at first and at the end, and so many updates of warm-up."""
    return {"_name": "composite", "groups": {part: _adam(*rate, warmup) for part, rate in rates.items()}}


def _adam(lr: float, min_lr: float, warmup: int) -> Values:
    """Settings of one group of parameters."""
    return {
        "lr_float": lr,
        "optimizer": {"_name": "adam", "lr": [lr], "adam_betas": "(0.9, 0.999)", "weight_decay": 0.01},
        "lr_scheduler": {"_name": "cosine", "warmup_updates": warmup, "min_lr": min_lr},
    }


def _preset(name: str, model: str, table: str, data: _Data, values: Values, phase: str) -> Preset:
    values = {**data.values, **values}
    return Preset(name, model, f"{table}, on {data.label}", values, _recipe(data, model, values, phase))


register_presets(
    _preset(f"{model}_{key}{name}", model, table, data, values, "iem" if name == "_iem" else "end_to_end")
    for key, data in _DATA.items()
    for model, name, table, values in _ROWS
)
register_configs(
    _preset(f"{key}_{run}", model, table, _DATA[data], values, run if run in ("iem", "finetune") else "end_to_end")
    for key, data in _RUN_DATA.items()
    for run, model, table, values in _RUNS
)
