"""The parts of a language model that depend on the vocabulary, as the flags ask for them."""

from typing import Any

from fairseq import options
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from torch import nn


def word_embedding(cfg: Any, dictionary: Any) -> nn.Module:
    """``nn.Embedding`` or fairseq's ``AdaptiveInput``."""
    if not cfg.adaptive_input:
        return nn.Embedding(len(dictionary), cfg.decoder_embed_dim, dictionary.pad())
    return AdaptiveInput(
        len(dictionary),
        dictionary.pad(),
        cfg.decoder_embed_dim,
        cfg.adaptive_input_factor,
        cfg.decoder_embed_dim,
        options.eval_str_list(cfg.adaptive_input_cutoff, type=int),
    )


def adaptive_softmax(cfg: Any, vocabulary: int, words: nn.Module) -> AdaptiveSoftmax | None:
    """fairseq's ``AdaptiveSoftmax``, or None where the flags ask for a plain one."""
    if not cfg.adaptive_softmax_cutoff:
        return None
    return AdaptiveSoftmax(
        vocabulary,
        cfg.decoder_embed_dim,
        options.eval_str_list(cfg.adaptive_softmax_cutoff, type=int),
        dropout=cfg.adaptive_softmax_dropout,
        factor=cfg.adaptive_softmax_factor,
        adaptive_inputs=words if cfg.tie_adaptive_weights else None,
        tie_proj=cfg.tie_adaptive_proj,
    )


def initialise(module: nn.Module, std: float) -> None:
    """Weights normal around 0, biases 0, padding embedding 0; fairseq's adaptive modules keep their own."""
    if isinstance(module, AdaptiveInput | AdaptiveSoftmax):
        return
    if isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d):
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=std)
        if module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])
    for child in module.children():
        initialise(child, std)
