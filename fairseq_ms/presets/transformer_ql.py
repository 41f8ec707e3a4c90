"""Presets of "Transformer-QL": its own model, Transformer-XL and the Compressive Transformer.

The lengths are those of training; the tables' others are given when testing.
"""

from dataclasses import dataclass

from fairseq_ms.presets.registry import Preset, Recipe, Values, register_presets


@dataclass(frozen=True)
class _Training:
    """A line of Appendix E: tokens are those of a batch, and learning rates the first and the last one."""

    sizes: Values
    tokens: int
    updates: int
    lr: float
    min_lr: float
    clip: float


def _sizes(dim: int, heads: int, ffn_dim: int, dropout: float) -> Values:
    """Appendix E's dropout is also that between the two projections of a feed-forward block."""
    return {
        "decoder_normalize_before": True,
        "init_std": 0.02,
        "proj_init_std": 0.01,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "decoder_embed_dim": dim,
        "decoder_ffn_embed_dim": ffn_dim,
        "decoder_attention_heads": heads,
    }


def _large(dim: int) -> Values:
    """SimpleBooks-92 and WikiText-103; Table 2's narrow models keep "the rest of the hyper-parameters same"."""
    sizes = _sizes(dim, 16, 6144, 0.15)
    return sizes if dim == 1536 else {**sizes, "attention_head_dim": 96}


def _adaptive(cutoffs: str) -> Values:
    """div_val 4 and proj_same_dim, with the weights of input and output tied."""
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoffs,
        "adaptive_softmax_cutoff": cutoffs,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "project_adaptive_head": True,
    }


_WT103 = _adaptive("20000,40000,200000")
_TIED = {"share_decoder_input_output_embed": True}
_TRAINING = {
    "simplebooks2": _Training({**_sizes(256, 4, 1024, 0.1), **_TIED}, 128 * 8, 60_000, 0.00025, 1e-6, 0.25),
    "simplebooks92": _Training({**_large(1536), **_adaptive("20000,40000")}, 512 * 8, 250_000, 0.0001, 4e-7, 0.1),
    "wt103": _Training({**_large(1536), **_WT103}, 512 * 16, 350_000, 0.0001, 4e-7, 0.1),
    # Table 2's smaller models.
    "wt103_d512": _Training({**_large(512), **_WT103}, 512 * 16, 350_000, 0.0005, 2e-6, 0.1),
    "wt103_d1024": _Training({**_large(1024), **_WT103}, 512 * 16, 350_000, 0.00025, 1e-6, 0.1),
}


def _xl(segment: int, memory: int) -> Values:
    return {"tokens_per_sample": segment, "mem_len": memory}


def _compressive(segment: int, memory: int, compressed: int) -> Values:
    return {**_xl(segment, memory), "compressed_mem_len": compressed}


def _ql(segment: int, memory: int) -> Values:
    return {**_xl(segment, memory), "droppath": 0.3}


# Model, line of Appendix E, tables, and what else differs from the model's defaults.
_ROWS: list[tuple[str, str, str, Values]] = [
    ("transformer_xl", "simplebooks2", "Table 1", _xl(8, 8)),
    ("transformer_xl", "simplebooks92", "Table 1", _xl(8, 8)),
    ("transformer_xl", "wt103", "Tables 1, 2 and 3", _xl(16, 16)),
    ("transformer_xl", "wt103_d512", "Table 2", _xl(16, 16)),
    ("transformer_xl", "wt103_d1024", "Table 2", _xl(16, 16)),
    ("compressive_transformer", "simplebooks2", "Table 1", _compressive(4, 6, 6)),
    ("compressive_transformer", "simplebooks92", "Table 1", _compressive(4, 6, 6)),
    ("compressive_transformer", "wt103", "Table 1", _compressive(8, 12, 12)),
    ("transformer_ql", "simplebooks2", "Tables 1 and 5", _ql(8, 8)),
    ("transformer_ql", "simplebooks92", "Tables 1 and 5", _ql(8, 8)),
    ("transformer_ql", "wt103", "Tables 1, 2, 3 and 5", _ql(16, 16)),
    ("transformer_ql", "wt103_d512", "Table 2", _ql(16, 16)),
    ("transformer_ql", "wt103_d1024", "Table 2", _ql(16, 16)),
    ("transformer_ql", "simplebooks2_ms", "Table 5 (Multi-scale Transformer)", _ql(16, 0)),
    ("transformer_ql", "simplebooks92_ms", "Table 5 (Multi-scale Transformer)", _ql(64, 0)),
    ("transformer_ql", "wt103_ms", "Table 5 (Multi-scale Transformer)", _ql(128, 0)),
]


# Bands of the vocabulary without a target have no gradient, for which fairseq's default backend would wait.
_LEGACY_DDP = {"distributed_training": {"ddp_backend": "legacy_ddp"}}


def _preset(model: str, name: str, table: str, values: Values) -> Preset:
    training, segment = _TRAINING[name.removesuffix("_ms")], values["tokens_per_sample"]
    assert isinstance(segment, int)
    adaptive = "adaptive_softmax_cutoff" in training.sizes
    recipe = Recipe(
        'Appendix E of "Transformer-QL"',
        {
            **(_LEGACY_DDP if adaptive else {}),
            "task": {"_name": "streaming_language_modeling"},
            "dataset": {"batch_size": training.tokens // segment},
            "criterion": {"_name": "adaptive_loss" if adaptive else "linear_cross_entropy"},
            "optimization": {"max_update": training.updates, "lr": [training.lr], "clip_norm": training.clip},
            "optimizer": {"_name": "adam"},
            "lr_scheduler": {"_name": "cosine", "warmup_updates": 0, "min_lr": training.min_lr},
        },
        "dataset.batch_size is the number of parallel streams: with several GPUs, divide it by their number.",
    )
    return Preset(f"{model}_{name}", model, table, {**training.sizes, **values}, recipe)


register_presets(_preset(*row) for row in _ROWS)
