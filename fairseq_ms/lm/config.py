"""The flags that every language model has, and what must hold between them."""

import ast
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass
from enum import Enum
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from fairseq_ms.core.adaptive import Bands
from fairseq_ms.errors import UsageError
from fairseq_ms.lm.choices import Activation, Norm, Positions, Recompute, ResidualStart, option, probability


@dataclass
class TransformerFlags(FairseqDataclass):
    """Flags of every model; names and meanings are fairseq's where fairseq has them."""

    activation_fn: Activation = option(
        "gelu",
        "activation function of the feed-forward blocks; swiglu's have two thirds of their width, to the "
        "nearest multiple of 8, since it reads two numbers where others read one: as many parameters",
    )
    activation_dropout: float = probability(0.0, "dropout probability after activation in FFN")
    norm: Norm = option("layer", "layer norm, or RMS norm without mean and shift")
    no_bias: bool = option(False, "no biases in the projections of attention and feed-forward blocks")
    init_residual: ResidualStart = option(
        "normal",
        "what projections into a residual stream of L layers start from: --init-std (normal), "
        "--init-std / sqrt(2 L) (scaled), or zero",
    )
    checkpoint_activations: bool = option(
        False, "keep only the input of every transformer layer, and run the layer again in backward"
    )
    compile: bool = option(False, "train by layers that torch.compile has compiled; all else runs as it is")
    recompute: Recompute = option(
        "pointwise",
        "what to compute again in backward instead of keeping it: layer norm, activation, "
        "dropout masks and scores of attention with dropout (pointwise), or nothing (none)",
    )
    add_bos_token: bool = II("task.add_bos_token")
    # The streaming task leaves it to the model where it is not given.
    tokens_per_sample: Optional[int] = II("task.tokens_per_sample")
    max_target_positions: Optional[int] = II("task.max_target_positions")


@dataclass
class LanguageModelFlags(TransformerFlags):
    """Flags of every model but the hierarchical ones."""

    dropout: float = probability(0.1, "dropout probability")
    attention_dropout: float = probability(0.1, "dropout probability for attention weights")
    decoder_embed_dim: int = option(768, "model dimension")
    decoder_ffn_embed_dim: int = option(3072, "width of the feed-forward blocks")
    decoder_attention_heads: int = option(12, "number of attention heads", least=1)
    share_decoder_input_output_embed: bool = option(False, "share decoder input and output embeddings")
    adaptive_input: bool = option(False, "if set, uses adaptive input")
    adaptive_input_factor: float = option(4, "adaptive input factor", needs=["adaptive_input"])
    adaptive_input_cutoff: Optional[str] = option(
        None, "comma separated list of adaptive input cutoff points", needs=["adaptive_input"]
    )
    adaptive_softmax_cutoff: Optional[str] = option(
        None, "comma separated list of adaptive softmax cutoff points. Must be used with adaptive_loss criterion"
    )
    adaptive_softmax_dropout: float = probability(
        0, "sets adaptive softmax dropout for the tail projections", needs=["adaptive_softmax_cutoff"]
    )
    adaptive_softmax_factor: float = option(4, "adaptive softmax factor", needs=["adaptive_softmax_cutoff"])
    tie_adaptive_weights: bool = option(False, "if set, ties the weights of adaptive softmax and adaptive input")
    tie_adaptive_proj: bool = option(
        False,
        "if set, ties the projection weights of adaptive softmax and adaptive input",
        needs=["tie_adaptive_weights"],
    )
    project_adaptive_head: bool = option(
        False,
        "project features for the most frequent words of adaptive softmax, too, as Transformer-XL does",
        needs=["adaptive_softmax_cutoff"],
    )
    init_std: float = option(0.02, "standard deviation of the normal distribution weights start from", least=0)
    embedding_init_std: Optional[float] = option(
        None, "standard deviation that word and position embeddings start from (default: --init-std)", least=0
    )


@dataclass
class PositionFlags(TransformerFlags):
    """Flags of models without a memory: how they tell positions apart, and what their attention is made of."""

    positions: Positions = option(
        "learned",
        "learned: added to the tokens, --max-target-positions of them; rotary: queries and keys are turned "
        "by them; none: order comes from the causal mask and blocks alone; without learned ones any length works",
    )
    rotary_base: float = option(
        10000.0,
        "base of --positions rotary: the slowest channels turn by about 1 / base a token",
        above=1,
        needs=["positions rotary"],
    )
    decoder_normalize_after: bool = option(
        False, "norms after the residual connections (post-LN) instead of in front of each decoder block"
    )
    qk_norm: str = option(
        "False",
        "RMS norm of every head's queries and keys, before --positions rotary; with the word scaled, a learned "
        "temperature a head multiplies the queries",
        argparse_const="True",
    )
    sinks: bool = option(
        False, "every head may attend to nothing: a key with a learned score, from 0, and a value of zero"
    )
    short_conv: int = option(
        0,
        "add to every normalised input of attention so many before it, each times a learned weight a channel "
        "(a causal depthwise convolution, from zero)",
        least=0,
    )


@dataclass
class MemorylessFlags(LanguageModelFlags, PositionFlags):
    """Flags of models without a memory but the hierarchical ones."""

    kv_heads: Optional[int] = option(
        None,
        "heads of keys and values, each of which serves as many of --decoder-attention-heads side by side (grouped "
        "queries; default: as many)",
        least=1,
    )
    scale_embedding: bool = option(False, "multiply embedded words by the square root of --decoder-embed-dim")


@dataclass
class OneStackFlags(MemorylessFlags):
    """Flags of models of one stack of layers, as others' models are too."""

    attention_head_dim: Optional[int] = option(
        None, "width of an attention head (default: --decoder-embed-dim / heads)", least=1
    )
    norm_eps: float = option(1e-5, "what norms, those of heads too, add to a variance or mean square", above=0)
    no_decoder_final_norm: bool = option(False, "don't add an extra layernorm after the last decoder block")
    unpredicted_symbols: Optional[str] = option(
        None, "symbols of the dictionary, separated by spaces, that are read and never predicted"
    )


# The fields of a configuration by name, with what ``option`` says of each.
Flags = Mapping[str, Field[Any]]
_BOUNDS = {"least": ("at least", operator.ge), "above": ("above", operator.gt), "below": ("below", operator.lt)}


def require(condition: bool, message: str) -> None:
    """Raise ``UsageError(message)`` unless the condition holds."""
    if not condition:
        raise UsageError(message)


def fill_in_positions(cfg: Any) -> int:
    """Set ``--max-target-positions`` where it is not given, and return how many of them text can have.

    With ``--add-bos-token`` fairseq puts a symbol before every row, beyond ``--tokens-per-sample``.
    """
    extra = int(cfg.add_bos_token)
    if getattr(cfg, "max_target_positions", None) is None:
        cfg.max_target_positions = cfg.tokens_per_sample + extra
    return int(cfg.max_target_positions) - extra


def validate_positions(cfg: Any) -> None:
    """Raise ``UsageError`` unless a row of ``--tokens-per-sample`` fits into learned ``--max-target-positions``."""
    if str(getattr(cfg, "positions", "learned")) != "learned":
        return
    positions = int(cfg.max_target_positions)
    got = f"{cfg.tokens_per_sample} and --add-bos-token" if cfg.add_bos_token else str(cfg.tokens_per_sample)
    require(
        cfg.tokens_per_sample + int(cfg.add_bos_token) <= positions,
        f"--tokens-per-sample must not exceed the model's --max-target-positions {positions}: got {got}",
    )


def flag(name: str) -> str:
    """A field of a configuration as users write it: ``--init-std``."""
    return "--" + name.replace("_", "-")


def criterion_of(cfg: Any) -> str:
    """The name of the criterion; `fairseq-validate` puts its whole configuration into the model's instead."""
    return str(getattr(cfg.criterion, "_name", cfg.criterion))


def check_ranges(flags: Flags, cfg: Any) -> None:
    """Raise ``UsageError`` on a number outside the bounds that stand beside its flag."""
    for name, known in flags.items():
        bounds = [(*_BOUNDS[rule], bound) for rule, bound in known.metadata.items() if rule in _BOUNDS]
        value = getattr(cfg, name) if bounds else None
        allowed = " and ".join(f"{words} {bound}" for words, _, bound in bounds)
        fits = value is None or all(holds(value, bound) for _, holds, bound in bounds)
        require(fits, f"{flag(name)} must be {allowed}: got {value}")


def check_needs(flags: Flags, cfg: Any) -> None:
    """Raise ``UsageError`` on a flag that is given without any of those it needs."""
    for name, known in flags.items():
        needs = [need.split() for need in known.metadata.get("needs", ())]
        if needs and not any(_is_given(cfg, *need) for need in needs):
            refuse_given(flags, cfg, [name], "without " + " or ".join(" ".join([flag(n), *v]) for n, *v in needs))


def _is_given(cfg: Any, name: str, value: str | None = None) -> bool:
    given = criterion_of(cfg) if name == "criterion" else getattr(cfg, name)
    return bool(given) if value is None else str(given) == value


def refuse_given(flags: Flags, cfg: Any, names: Iterable[str], why: str) -> None:
    """Raise ``UsageError`` if one of these flags, which has no effect, is not at its default."""
    for name in names:
        value, default = getattr(cfg, name), flags[name].default
        require(value == default or str(value) == str(default), f"{flag(name)} has no effect {why}: got {value}")


# The flags of those fields of the core that have another name.
_FLAG_OF = {
    "activation": "activation_fn",
    "dim": "decoder_embed_dim",
    "ffn_dim": "decoder_ffn_embed_dim",
    "heads": "decoder_attention_heads",
    "head_dim": "attention_head_dim",
    "final_norm": "no_decoder_final_norm",
    "unpredicted": "unpredicted_symbols",
    "layers": "decoder_layers",
    "segment_len": "tokens_per_sample",
    "token_dim": "token_embed_dim",
    "position_dim": "position_embed_dim",
    "local_heads": "local_attention_heads",
    "local_ffn_dim": "local_ffn_embed_dim",
    "output_vocab_size": "output_dictionary_size",
    "tie_embeddings": "share_decoder_input_output_embed",
    "tie_adaptive_projections": "tie_adaptive_proj",
    "adaptive_softmax": "adaptive_softmax_cutoff",
    "adaptive_input.cutoffs": "adaptive_input_cutoff",
    "adaptive_input.factor": "adaptive_input_factor",
    "adaptive_softmax.cutoffs": "adaptive_softmax_cutoff",
    "adaptive_softmax.factor": "adaptive_softmax_factor",
}


@contextmanager
def naming_flags(flags: Flags) -> Iterator[None]:
    """Context manager: a ValueError of the core becomes a ``UsageError`` that names flags instead of fields."""
    names = {**{name: name for name in flags}, **_FLAG_OF}
    names["scales"] = "scale_windows" if "scale_windows" in flags else "scale_layers"
    names["Scale.heads"] = "scale_heads" if "scale_heads" in flags else "scale_windows"
    spelled = {**{name: flag(own) for name, own in names.items()}, "vocab_size": "the dictionary's size"}
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        words = re.split(r"(\w+(?:\.\w+)*)", str(error))
        raise UsageError("".join(spelled.get(word, word) for word in words)) from error


def of_core(cfg: Any, *names: str) -> dict[str, Any]:
    """Fields of the core's configurations by name, with the values of their flags."""
    values = {name: getattr(cfg, _FLAG_OF.get(name, name)) for name in names}
    return {name: str(value) if isinstance(value, Enum) else value for name, value in values.items()}


def layer_settings(cfg: Any) -> dict[str, Any]:
    """The fields of ``core.config.LayerConfig`` by name, from the flags of a model's layers."""
    settings = {
        **of_core(cfg, "dim", "ffn_dim", "heads", "activation", "norm", "init_residual"),
        **of_core(cfg, "dropout", "attention_dropout", "activation_dropout"),
        "bias": not cfg.no_bias,
        "recompute": str(cfg.recompute) == "pointwise",
        "checkpoint": cfg.checkpoint_activations,
    }
    if hasattr(cfg, "positions"):
        settings |= of_core(cfg, "positions", "rotary_base", "short_conv", "sinks")
        settings["normalize_before"] = not cfg.decoder_normalize_after
        if hasattr(cfg, "norm_eps"):
            settings |= {**of_core(cfg, "head_dim", "norm_eps"), "final_norm": not cfg.no_decoder_final_norm}
        settings["qk_norm"] = {"False": False, "True": True}.get(str(cfg.qk_norm), cfg.qk_norm)
    return settings


def model_settings(cfg: LanguageModelFlags, source_dictionary: Any, target_dictionary: Any) -> dict[str, Any]:
    """The fields of ``core.config.ModelConfig`` by name, from the flags that all models share."""
    return {
        **layer_settings(cfg),
        **of_core(cfg, "tie_embeddings", "tie_adaptive_weights", "tie_adaptive_projections"),
        **of_core(cfg, "init_std", "embedding_init_std"),
        "vocab_size": len(source_dictionary),
        "output_vocab_size": len(target_dictionary),
        "padding_idx": source_dictionary.pad(),
        "max_positions": int(cfg.max_target_positions or 0),
        "adaptive_input": _bands(cfg, "adaptive_input") if cfg.adaptive_input else None,
        "adaptive_softmax": _bands(cfg, "adaptive_softmax") if cfg.adaptive_softmax_cutoff else None,
        "project_adaptive_head": bool(cfg.project_adaptive_head and cfg.adaptive_softmax_cutoff),
        "scale_embedding": getattr(cfg, "scale_embedding", False),
        "unpredicted": tuple(
            symbols_of("--unpredicted-symbols", getattr(cfg, "unpredicted_symbols", None), target_dictionary)
        ),
        "kv_heads": getattr(cfg, "kv_heads", None),
    }


def symbols_of(spelled: str, text: str | None, dictionary: Any) -> list[int]:
    """The numbers of a dictionary's symbols in a text; UsageError for what is none."""
    symbols = (text or "").split()
    for symbol in symbols:
        require(
            symbol in dictionary.indices,
            f"{spelled} must be symbols of the dictionary: got {symbol!r}, which it does not have",
        )
    return [dictionary.index(symbol) for symbol in symbols]


def _bands(cfg: LanguageModelFlags, name: str) -> Bands:
    cutoffs = parse_cutoffs(flag(f"{name}_cutoff"), getattr(cfg, f"{name}_cutoff"))
    return Bands(cutoffs, getattr(cfg, f"{name}_factor"), getattr(cfg, f"{name}_dropout", 0.0))


def parse_cutoffs(spelled: str, text: str | None) -> tuple[int, ...]:
    """``"20000,40000"`` as (20000, 40000); UsageError unless they are whole numbers."""
    items = [item.strip() for item in (text or "").split(",")]
    if not all(item.isdecimal() for item in items):
        raise UsageError(f"{spelled} must be a comma separated list of ascending whole numbers: got {text or 'none'}")
    return tuple(map(int, items))


def betas(given: Any) -> tuple[float, float]:
    """Adam's two numbers, which a command line gives as text; raises ``UsageError`` for anything else."""
    try:
        first, second = map(float, ast.literal_eval(given) if isinstance(given, str) else given)
    except (SyntaxError, TypeError, ValueError):
        first = second = math.nan
    if not (0.0 <= first < 1.0 and 0.0 <= second < 1.0):
        raise UsageError(f'--adam-betas must be two numbers from 0 to below 1, such as "(0.9, 0.98)": got {given}')
    return first, second


def enough_symbols(cfg: Any, least: int, beyond: int = 2) -> int:
    """The least size of a dictionary with ``beyond`` symbols after the last adaptive cutoff, and at least ``least``."""
    names = [name for name in ("adaptive_input_cutoff", "adaptive_softmax_cutoff") if getattr(cfg, name, None)]
    found = [parse_cutoffs(flag(name), getattr(cfg, name)) for name in names]
    return max([least, *(max(cutoffs) + beyond for cutoffs in found)])


def validate(cfg: Any, task: Any) -> None:
    """Raise ``UsageError`` on contradictory flags that the core cannot tell."""
    validate_positions(cfg)
    for adaptive in ("adaptive_input", "adaptive_softmax_cutoff"):
        require(
            not (cfg.share_decoder_input_output_embed and getattr(cfg, adaptive)),
            f"--share-decoder-input-output-embed must not be given with {flag(adaptive)} {getattr(cfg, adaptive)}: "
            "use --tie-adaptive-weights, with --adaptive-input and --adaptive-softmax-cutoff",
        )
    require(
        len(task.target_dictionary) > 3,
        f"--output-dictionary-size must be at least 4, with <unk> for all others: got {len(task.target_dictionary)}",
    )
