"""Presets of "Multi-scale Transformer Language Models"."""

from fairseq_ms.presets.registry import Preset, Recipe, Values, register_presets


def _recipe(criterion: str) -> Recipe:
    """A batch is 256 rows of 512 tokens; the rate falls over a million updates *after* the 40,000 of warm-up."""
    return Recipe(
        'Section 4.2 of "Multi-scale Transformer Language Models"',
        {
            "common": {"fp16": True},
            "task": {"_name": "language_modeling", "tokens_per_sample": 512, "sample_break_mode": "none"},
            "dataset": {"batch_size": 32},
            "criterion": {"_name": criterion},
            "optimization": {"max_update": 1_040_000, "update_freq": [8], "lr": [0.00025]},
            "optimizer": {"_name": "adam"},
            "lr_scheduler": {"_name": "cosine", "warmup_updates": 40_000},
            "model": {
                "decoder_embed_dim": 768,
                "decoder_ffn_embed_dim": 3072,
                "decoder_attention_heads": 12,
                "dropout": 0.1,
                "attention_dropout": 0.1,
                "activation_dropout": 0.1,
            },
        },
        "The paper trains in mixed precision: without a GPU add common.fp16=false. A batch is 32 x 8 rows of 512 "
        "tokens: with more or larger GPUs, lower optimization.update_freq.",
    )


_TOKENS, _BLOCKS = _recipe("linear_cross_entropy"), _recipe("bag_of_words")


def _wide(dim: int) -> dict[str, int]:
    """Heads of 64, and a feed-forward block four times as wide."""
    return {"decoder_embed_dim": dim, "decoder_ffn_embed_dim": 4 * dim, "decoder_attention_heads": dim // 64}


def _vanilla(layers: int, **values: object) -> Values:
    return {"decoder_layers": layers, **values}


def _retina(windows: str, **values: object) -> Values:
    return {"decoder_layers": 12, "scale_windows": windows, **values}


def _scales(*layers: int, **values: object) -> Values:
    """Layers at scales a factor of 4 apart, the coarsest first, as the paper's tables print them."""
    factors = [4**power for power in reversed(range(len(layers)))]
    return {"scale_layers": ",".join(f"{factor}x={count}" for factor, count in zip(factors, layers)), **values}


# Model, name, table, and what differs from the model's defaults.
_ROWS: list[tuple[str, str, str, Values]] = [
    # CC-News
    ("vanilla_lm", "ccnews_10", "Table 2", _vanilla(10, **_wide(1024))),
    ("vanilla_lm", "ccnews_12", "Table 2", _vanilla(12, **_wide(1024))),
    ("vanilla_lm", "ccnews_14", "Table 2", _vanilla(14, **_wide(1024))),
    ("multiscale_topdown", "ccnews_5_5_6_6", "Table 2", _scales(5, 5, 6, 6, **_wide(1024))),
    ("multiscale_topdown", "ccnews_5_5_9_9", "Table 2", _scales(5, 5, 9, 9, **_wide(1024))),
    ("multiscale_topdown", "ccnews_2_4_8_12", "Table 2", _scales(2, 4, 8, 12, **_wide(1024))),
    # WikiText-103
    ("vanilla_lm", "wt103_12", "Section 4.2", _vanilla(12)),
    ("vanilla_lm", "wt103_14", "Section 4.2", _vanilla(14)),
    ("vanilla_lm", "wt103_16", "Table 3", _vanilla(16)),
    ("retina_lm", "wt103_16", "Table 3", {"decoder_layers": 16}),
    ("multiscale_topdown", "wt103_6_12", "Table 3", _scales(6, 12)),
    ("multiscale_topdown", "wt103_5_10", "Table 3", _scales(5, 10)),
    ("multiscale_bottomup", "wt103_5_10", "Table 3", _scales(5, 10)),
    # BookCorpus; Figure 3 says "fewer than 8 layers" of its smaller models, whose numbers only the drawing has.
    ("vanilla_lm", "books_2", "Figure 3", _vanilla(2)),
    ("vanilla_lm", "books_4", "Figure 3", _vanilla(4)),
    ("vanilla_lm", "books_6", "Figure 3", _vanilla(6)),
    ("vanilla_lm", "books_8", "Figure 3", _vanilla(8)),
    ("vanilla_lm", "books_10", "Figure 3", _vanilla(10)),
    ("vanilla_lm", "books_12", "Table 4", _vanilla(12)),
    ("vanilla_lm", "books_14", "Table 4", _vanilla(14)),
    ("vanilla_lm", "books_16", "Section 4.2", _vanilla(16)),
    ("vanilla_lm", "books_30_narrow", "Table 4", _vanilla(30, **_wide(256))),
    ("vanilla_lm", "books_20_narrow", "Table 4", _vanilla(20, **_wide(512))),
    ("multiscale_topdown", "books_8_12", "Table 4", _scales(8, 12)),
    ("multiscale_topdown", "books_4_8_12", "Table 4", _scales(4, 8, 12)),
    ("multiscale_topdown", "books_2_4_8_12", "Table 4", _scales(2, 4, 8, 12)),
    ("multiscale_topdown", "books_16_12_6_1", "Table 4", _scales(16, 12, 6, 1)),
    ("multiscale_topdown", "books_10_10_8_5", "Table 4", _scales(10, 10, 8, 5)),
    ("multiscale_topdown", "books_8_8_7_7", "Table 4", _scales(8, 8, 7, 7)),
    ("multiscale_topdown", "books_7_7_8_8", "Table 4", _scales(7, 7, 8, 8)),
    ("multiscale_topdown", "books_5_5_9_9", "Table 4", _scales(5, 5, 9, 9)),
    ("multiscale_topdown", "books_3_3_10_10", "Table 4", _scales(3, 3, 10, 10)),
    ("multiscale_topdown", "books_2_2_11_11", "Table 4", _scales(2, 2, 11, 11)),
    ("multiscale_topdown", "books_1_1_12_12", "Table 4", _scales(1, 1, 12, 12)),
    ("multiscale_topdown", "books_conv_7_7_8_8", "Table 4", _scales(7, 7, 8, 8, downsampler="conv")),
    ("multiscale_topdown", "books_max_7_7_8_8", "Section 5.3", _scales(7, 7, 8, 8, downsampler="max")),
    ("vanilla_lm", "books_12_window8", "Table 4", _vanilla(12, scale_windows="1x=0:8")),
    ("vanilla_lm", "books_12_window16", "Table 4", _vanilla(12, scale_windows="1x=0:16")),
    ("vanilla_lm", "books_12_window64", "Table 4", _vanilla(12, scale_windows="1x=0:64")),
    ("vanilla_lm", "books_12_window128", "Table 4", _vanilla(12, scale_windows="1x=0:128")),
    ("vanilla_lm", "books_12_window256", "Table 4", _vanilla(12, scale_windows="1x=0:256")),
    ("retina_lm", "books_12_8_256_512", "Table 4", _retina("1x=0:8,4x=8:256,16x=256:512")),
    ("retina_lm", "books_12_16_256_512", "Table 4", _retina("1x=0:16,4x=16:256,16x=256:512")),
    (
        *("retina_lm", "books_12_128_256_512", "Table 4"),
        _retina("1x=0:128,4x=64:256,16x=128:512", window_overlap="allow"),
    ),
    ("multiscale_bottomup", "books_8_9_9", "Table 5", _scales(8, 9, 9)),
    ("multiscale_bottomup", "books_7_8_8", "Table 8", _scales(7, 8, 8)),
    # WikiText-103; the paper does not say how many layers these models have.
    ("coarse_lm", "wt103_2x", "Table 7", {"scale_layers": "2x=12"}),
    ("coarse_lm", "wt103_4x", "Table 7", {"scale_layers": "4x=12"}),
    ("coarse_lm", "wt103_8x", "Table 7", {"scale_layers": "8x=12"}),
    ("coarse_lm", "wt103_16x", "Table 7", {"scale_layers": "16x=12"}),
    ("coarse_lm", "wt103_64x", "Table 7", {"scale_layers": "64x=12"}),
]

# "Dropout of 0.1 everywhere including the attention scores and GeLU activations" (Section 4.2); the models' default for
# the last is none.
_EVERYWHERE = {"activation_dropout": 0.1}

register_presets(
    Preset(f"{model}_{name}", model, table, {**_EVERYWHERE, **values}, _BLOCKS if model == "coarse_lm" else _TOKENS)
    for model, name, table, values in _ROWS
)
