"""The parts of a language model that depend on the vocabulary, as the flags ask for them."""

from typing import Any

from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from torch import nn

from fairseq_ms.errors import UsageError

# Flags, and the fewest symbols between two cutoffs: fairseq's adaptive input writes to row 1 of every band.
_CUTOFFS = {"adaptive_input_cutoff": 2, "adaptive_softmax_cutoff": 1}


def parse_cutoffs(name: str, text: str, symbols: int | None = None) -> list[int]:
    """``"20000,40000"`` as [20000, 40000]; UsageError unless they ascend and stay within the number of symbols."""
    numbers = [int(item) if item.strip().isdecimal() else 0 for item in text.split(",")]
    least = _CUTOFFS[name]
    bands = [high - low for low, high in zip([0, *numbers], numbers)]
    if symbols is not None and symbols != numbers[-1]:
        bands.append(symbols - numbers[-1])
    if min(bands) < least:
        flag, end = f"--{name.replace('_', '-')}", "" if symbols is None else f" up to the dictionary's {symbols}"
        raise UsageError(f"{flag} must be ascending and cut off bands of at least {least} symbols{end}: got {text!r}")
    return numbers


def enough_symbols(cfg: Any, least: int) -> int:
    """How many symbols a dictionary needs for a model's adaptive cutoffs with a band behind the last, or ``least``."""
    texts = {name: getattr(cfg, name, None) for name in _CUTOFFS}
    return max([least, *(parse_cutoffs(name, text)[-1] + _CUTOFFS[name] for name, text in texts.items() if text)])


def validate_cutoffs(cfg: Any, symbols: int) -> None:
    """Raise ``UsageError`` on adaptive cutoffs that are no ascending numbers or exceed the number of symbols."""
    for name in _CUTOFFS:
        if getattr(cfg, name, None):
            parse_cutoffs(name, getattr(cfg, name), symbols)


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
        parse_cutoffs("adaptive_input_cutoff", cfg.adaptive_input_cutoff, len(dictionary)),
    )


def adaptive_softmax(cfg: Any, vocabulary: int, words: nn.Module) -> AdaptiveSoftmax | None:
    """fairseq's ``AdaptiveSoftmax``, or None where the flags ask for a plain one."""
    if not cfg.adaptive_softmax_cutoff:
        return None
    return AdaptiveSoftmax(
        vocabulary,
        cfg.decoder_embed_dim,
        parse_cutoffs("adaptive_softmax_cutoff", cfg.adaptive_softmax_cutoff, vocabulary),
        dropout=cfg.adaptive_softmax_dropout,
        factor=cfg.adaptive_softmax_factor,
        adaptive_inputs=words if cfg.tie_adaptive_weights else None,
        tie_proj=cfg.tie_adaptive_proj,
    )


def embedding_std(cfg: Any) -> float:
    """The standard deviation that embeddings start from."""
    return float(cfg.init_std if cfg.embedding_init_std is None else cfg.embedding_init_std)


def initialise(module: nn.Module, std: float, embedding_std: float) -> None:
    """Weights normal around 0, biases 0, padding embedding 0; fairseq's adaptive modules keep their own."""
    if isinstance(module, AdaptiveInput | AdaptiveSoftmax):
        return
    if isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d):
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=embedding_std)
        if module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])
    for child in module.children():
        initialise(child, std, embedding_std)
