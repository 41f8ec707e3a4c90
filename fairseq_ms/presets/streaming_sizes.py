"""Sizes of the models of the Transformer-QL paper's experiments (Section 3.1 and Appendix E)."""

from typing import Any

_COMMON = {"decoder_normalize_before": True, "init_std": 0.02, "proj_init_std": 0.01}


def _dropouts(probability: float) -> dict[str, float]:
    """Appendix E's dropout is also that between the two projections of a feed-forward block."""
    return {"dropout": probability, "attention_dropout": probability, "activation_dropout": probability}


def _adaptive(cutoffs: str) -> dict[str, Any]:
    """div_val 4, with the weights of input and output tied."""
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoffs,
        "adaptive_softmax_cutoff": cutoffs,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
    }


def _wide(dim: int) -> dict[str, Any]:
    return {"decoder_embed_dim": dim, "decoder_ffn_embed_dim": 4 * dim, "decoder_attention_heads": 16}


SIMPLEBOOKS2 = {
    **_COMMON,
    **_dropouts(0.1),
    "decoder_embed_dim": 256,
    "decoder_ffn_embed_dim": 1024,
    "decoder_attention_heads": 4,
    "share_decoder_input_output_embed": True,
}
SIMPLEBOOKS92 = {**_COMMON, **_dropouts(0.15), **_wide(1536), **_adaptive("20000,40000")}
WT103 = {**_COMMON, **_dropouts(0.15), **_wide(1536), **_adaptive("20000,40000,200000")}
# Table 2's smaller models.
WT103_D512 = {**WT103, **_wide(512)}
WT103_D1024 = {**WT103, **_wide(1024)}
