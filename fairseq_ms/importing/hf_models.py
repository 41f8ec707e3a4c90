"""Folders of Hugging Face's transformers: ``config.json``, safetensors and ``tokenizer.json``; none of its code runs.

A token keeps its number, as a symbol of that name. Of fairseq's own symbols, the end of a line stands for the newline
or, where there is none, the token that ends a text, and ``<s>`` for that which begins one; others are never predicted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_ms.errors import UsageError
from fairseq_ms.importing.source import Source
from fairseq_ms.importing.weights import Names, Stored, Weights, number
from fairseq_ms.tools import report
from fairseq_ms_pipeline.files import parsed
from fairseq_ms_pipeline.indexed import BOS, EOS, SPECIAL

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA = {
    "attention.norm": ("input_layernorm",),
    "attention.qkv": _QKV,
    "attention.out": ("self_attn.o_proj",),
    "ffn.norm": ("post_attention_layernorm",),
    "ffn.up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": ("mlp.down_proj",),
}
_OF_HEADS = {"attention.qk.query": ("self_attn.q_norm",), "attention.qk.key": ("self_attn.k_norm",)}
_GPT2 = {
    "attention.norm": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.out": ("attn.c_proj",),
    "ffn.norm": ("ln_2",),
    "ffn.up": ("mlp.c_fc",),
    "ffn.down": ("mlp.c_proj",),
}
_OTHERS = {"embed.words": "embed_tokens", "stack.norm": "norm", "project.project": "lm_head"}
_OTHERS_GPT2 = {"embed.words": "wte", "embed.positions": "wpe", "stack.norm": "ln_f", "project.project": "lm_head"}
_ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_accurate"),
    **{"gelu": "gelu", "relu": "relu", "silu": "swish", "swish": "swish", "tanh": "tanh"},
}
# Buffers of masks and of rotary frequencies.
_IDLE = r"(^|\.)attn\.(masked_)?bias$|rotary_emb\.inv_freq$"
# What rows are cut to where a model has room for more.
_LENGTH = 1024
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Family:
    """Models of one ``model_type``.

    Attributes:
        names: what they call their parts
        defaults: what ``config.json`` leaves out
        wanted: settings that must have this value, or be left out
        biases: settings any of which gives projections biases; True: some always have them
    """

    names: Names
    defaults: Mapping[str, Any]
    wanted: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] | bool = ()


_ROTARY = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_QWEN = {**_ROTARY, "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False}
_QWEN |= {"max_window_layers": 28, "max_position_embeddings": 32768}
_SILU = {"hidden_act": "silu"}
FAMILIES = {
    "llama": Family(
        Names("layers.{}.", _LLAMA, _OTHERS),
        {**_ROTARY, "max_position_embeddings": 2048},
        _SILU,
        ("attention_bias", "mlp_bias"),
    ),
    "mistral": Family(
        Names("layers.{}.", _LLAMA, _OTHERS),
        {**_ROTARY, "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        _SILU,
    ),
    "qwen2": Family(Names("layers.{}.", _LLAMA, _OTHERS), _QWEN, _SILU, True),
    "qwen3": Family(
        Names("layers.{}.", {**_LLAMA, **_OF_HEADS}, _OTHERS), {**_QWEN, "head_dim": 128}, _SILU, ("attention_bias",)
    ),
    "gpt2": Family(
        Names("h.{}.", _GPT2, _OTHERS_GPT2, transposed=True),
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024}
        | {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        True,
    ),
}


def read(folder: Path, windows: str | None) -> Source:
    """The model of a folder, through ``windows`` or its own; UsageError for what has no counterpart here."""
    config = _json(folder / "config.json")
    if not isinstance(config.get("model_type"), str) or config["model_type"] not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(f"SOURCE must be of model_type {known}: {folder} is {config.get('model_type') or 'none'}")
    family = FAMILIES[config["model_type"]]
    config = {**family.defaults, **config}
    wanted = {**family.wanted, "quantization_config": None, "num_experts": None, "num_local_experts": None}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise UsageError(f"SOURCE must have {name} {value}, or none: {folder} has {config[name]}")
    stored, name = _tensors(folder), "n_layer" if family.names.transposed else "num_hidden_layers"
    layers, told = family.names.layers_of(stored), number(f"SOURCE's {name}", config.get(name))
    if layers != told:
        # Before there is a list of all layers.
        raise UsageError(f"SOURCE must have the {told} layers that its configuration says: got weights of {layers}")
    flags = (_gpt2 if family.names.transposed else _rotary)(config)
    symbols = number("SOURCE's vocab_size", config.get("vocab_size"))
    flags["share_decoder_input_output_embed"] = bool(config["tie_word_embeddings"])
    if config["tie_word_embeddings"]:
        # Some files hold the copy.
        stored.pop("lm_head.weight", None)
    biases = family.biases if isinstance(family.biases, bool) else any(config.get(name) for name in family.biases)
    flags["no_bias"] = not biases
    if windows is not None:
        flags["scale_windows"] = windows
    # Before there is a list of all symbols.
    words = f"{family.names.others['embed.words']}.weight"
    if words not in stored or stored[words].shape[:1] != (symbols,):
        found = f"{words} of shape {stored[words].shape}" if words in stored else f"no {words}"
        rule = "SOURCE must have weights of the sizes that its configuration says"
        raise UsageError(f"{rule}: got {found} with vocab_size {symbols}")
    files, begin, end, adds_bos = _tokens(folder, config)
    taken = {BOS: begin, EOS: end}
    # Not twice in a sum: a token that has a symbol of fairseq's is predicted as that alone, the one that begins texts
    # where fairseq puts it before the targets of a row, too.
    own = {EOS: end, BOS: begin if adds_bos and begin != end else None}
    never = [symbol if own.get(place) is None else str(own[place]) for place, symbol in enumerate(SPECIAL)]
    flags["unpredicted_symbols"] = " ".join(never)
    longest = number("SOURCE's longest text", config.get("n_positions") or config.get("max_position_embeddings"))
    task = {"tokens_per_sample": min(longest - adds_bos, _LENGTH), "max_target_positions": longest}
    task |= {"add_bos_token": True} if adds_bos else {}

    def tensor(name: str, weights: Weights) -> Tensor:
        found = family.names.tensor(name, weights)
        if name not in ("embed.words.weight", "project.project.weight"):
            return found
        rows = found.new_zeros(len(SPECIAL) + len(found), found.size(1))
        rows[len(SPECIAL) :] = found
        for own, token in taken.items():
            if token is not None:
                rows[own] = found[token]
        return rows

    files["dict.txt"] = "".join(f"{token} 0\n" for token in range(symbols))
    every = [*SPECIAL, *map(str, range(symbols))]
    return Source(flags, task, stored, layers, tensor, every, files, _IDLE)


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of a GPT-2."""
    width = number("SOURCE's n_embd", config.get("n_embd"))
    if config["activation_function"] not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UsageError(f"SOURCE's activation_function must be one of {known}: got {config['activation_function']}")
    return {
        "decoder_embed_dim": width,
        "decoder_layers": number("SOURCE's n_layer", config.get("n_layer")),
        "decoder_attention_heads": number("SOURCE's n_head", config.get("n_head")),
        "decoder_ffn_embed_dim": number("SOURCE's n_inner", config.get("n_inner") or 4 * width),
        "activation_fn": _ACTIVATIONS[config["activation_function"]],
        "norm_eps": config["layer_norm_epsilon"],
        "dropout": config["resid_pdrop"],
        "attention_dropout": config["attn_pdrop"],
    }


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of all others."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    width, inner, layers, heads = (number(f"SOURCE's {name}", config.get(name)) for name in sizes)
    if inner % 8:
        raise UsageError(f"SOURCE's intermediate_size must be a multiple of 8: got {inner}")
    shared = number("SOURCE's num_key_value_heads", config.get("num_key_value_heads") or heads)
    # Of transformers 4, and of 5.
    ropes = [found for name in ("rope_scaling", "rope_parameters") if (found := config.get(name))]
    if wrong := [rope for rope in ropes if not isinstance(rope, dict)]:
        raise UsageError(f"SOURCE's rope_scaling and rope_parameters must be settings by name: got {wrong[0]!r}")
    for rope in (*ropes, {"partial_rotary_factor": config.get("partial_rotary_factor")}):
        told = {"rope_type": rope.get("type"), **rope, "rope_theta": None, "type": None}
        for name, value in told.items():
            if value not in (None, "default", 1.0):
                rule = "SOURCE must have rotary positions of rope_type default, which are not scaled"
                raise UsageError(f"{rule}: got {name} {value}")
    bases = [rope["rope_theta"] for rope in ropes if "rope_theta" in rope]
    return {
        "decoder_embed_dim": width,
        "decoder_layers": layers,
        "decoder_attention_heads": heads,
        # Of "swiglu", two thirds of this.
        "decoder_ffn_embed_dim": inner * 3 // 2,
        **({"kv_heads": shared} if shared != heads else {}),
        "attention_head_dim": number("SOURCE's head_dim", config.get("head_dim") or width // heads),
        "activation_fn": "swiglu",
        "norm": "rms",
        "norm_eps": config["rms_norm_eps"],
        "positions": "rotary",
        "rotary_base": [config["rope_theta"], *bases][-1],
        "qk_norm": "True" if config["model_type"] == "qwen3" else None,
        "scale_windows": _windows(config, layers),
        "dropout": 0.0,
        "attention_dropout": config.get("attention_dropout") or 0.0,
    }


def _windows(config: Mapping[str, Any], layers: int) -> str | None:
    """The windows that layers take in turns; None where all see everything, as in every Llama."""
    if config["model_type"] == "llama":
        return None
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    after = 0 if config["model_type"] == "mistral" else config.get("max_window_layers", 0)
    of_all = [_LAYER_TYPES[window is not None and layer >= after] for layer in range(layers)]
    # Those of Mistral itself are not looked at.
    types = of_all if config["model_type"] == "mistral" else config.get("layer_types") or of_all
    if len(types) != layers or not {*types} <= {*_LAYER_TYPES}:
        raise UsageError(f"SOURCE's layer_types must be {layers} of {' and '.join(_LAYER_TYPES)}: got {types}")
    if _LAYER_TYPES[1] not in types:
        return None
    what = "SOURCE's sliding_window"
    near = f"1x=0:{number(what, window)}"
    spelled = [near if kind == _LAYER_TYPES[1] else "1x=0:" for kind in types]
    period = next(n for n in range(1, layers + 1) if all(a == b for a, b in zip(spelled, spelled[n:])))
    return "|".join(spelled[:period])


def _json(file: Path) -> dict[str, Any]:
    try:
        found = parsed(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"SOURCE must be a folder of transformers: {file} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise UsageError(f"SOURCE must be a folder of transformers: {file} holds no settings")
    return found


def _tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder's safetensors, by their names without the model's; only headers are read."""
    report.require_package("safetensors", "fairseq-ms import", "safetensors")
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    names = _shards(index) if index.is_file() else ["model.safetensors"]
    stored: dict[str, Stored] = {}
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            wanted = "SOURCE must have its weights in model.safetensors, or beside model.safetensors.index.json"
            raise UsageError(f"{wanted}: {folder / name} is missing")
        try:
            file = safe_open(folder / name, "pt")
            for key in file.keys():  # noqa: SIM118
                own = key.removeprefix("model.").removeprefix("transformer.")
                if own in stored:
                    raise UsageError(f"SOURCE must have every tensor once: {name} has {key}, which was before it")
                shape = tuple(file.get_slice(key).get_shape())
                stored[own] = Stored(shape, partial(file.get_tensor, key))
        except SafetensorError as error:
            raise UsageError(f"SOURCE must have undamaged safetensors: {folder / name} is not ({error})") from error
    return stored


def _shards(index: Path) -> list[str]:
    found = _json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        rule = "must have a weight_map of tensors' names to files"
        raise UsageError(f"SOURCE's {index.name} {rule}: got {'none' if found is None else found}")
    return sorted({*found.values()})


def _tokens(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], int | None, int | None, bool]:
    """The files of its tokenizer, the tokens that begin a text and end a line, and whether texts begin so."""
    found, symbols = [], config["vocab_size"]
    for name in ("bos_token_id", "eos_token_id"):
        token = config.get(name)
        token = token[0] if isinstance(token, list) and token else token
        # Configurations of small models keep the numbers of large ones.
        found.append(token if isinstance(token, int) and 0 <= token < symbols else None)
    begin, end = found
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}, begin, end, False
    report.require_package("tokenizers", "the tokenizer of SOURCE", "tokenizers")
    from tokenizers import Tokenizer

    try:
        text = file.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower one
        raise UsageError(f"SOURCE must have a tokenizer.json that tokenizers reads: {file} is not ({error})") from error
    newline = next((n for name in ("\u010a", "<0x0A>", "\n") if (n := tokenizer.token_to_id(name)) is not None), end)
    first = tokenizer.encode("", add_special_tokens=True).ids
    settings = {"level": "hf_tokenizer", "tokenise": "none", "blank_lines": "keep"}
    files = {"tokenizer.json": text, "manifest.json": json.dumps({"settings": settings}) + "\n"}
    return files, begin, newline, begin is not None and first[:1] == [begin]
