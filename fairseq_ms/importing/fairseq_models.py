"""Checkpoints of fairseq: its ``transformer_lm`` with all presets, and our ``vanilla_lm``. No pickled code runs."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from fairseq_ms import core
from fairseq_ms.errors import UsageError
from fairseq_ms.importing.source import Source
from fairseq_ms.importing.weights import Names, Stored, Tensors, Weights, number
from fairseq_ms.lm import older_names
from fairseq_ms.models.vanilla import VanillaFlags
from fairseq_ms.tools import tokenizing, whole_files
from fairseq_ms_pipeline.indexed import PAD

# What a model here has not, if it is neither 0 nor empty.
_REFUSED = (
    *("character_embeddings", "decoder_layerdrop", "decoder_layers_to_keep", "quant_noise_pq", "quant_noise_scalar"),
    *("scale_fc", "scale_attn", "scale_heads", "scale_resids", "layernorm_embedding", "base_layers"),
    "decoder_xformers_att_config",
)
_SAME = (
    *("decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_layers", "decoder_attention_heads"),
    *("dropout", "attention_dropout"),
)
_ADAPTIVE = {
    "adaptive_input": ("adaptive_input", "adaptive_input_cutoff", "adaptive_input_factor"),
    "adaptive_softmax_cutoff": ("adaptive_softmax_cutoff", "adaptive_softmax_factor", "adaptive_softmax_dropout"),
    "tie_adaptive_weights": ("tie_adaptive_weights", "tie_adaptive_proj"),
}
_ACTIVATIONS = {"gelu_fast": "gelu_accurate"}
_NORMS = {
    True: {"attention.norm": ("self_attn_layer_norm",), "ffn.norm": ("final_layer_norm",)},
    False: {"after_attention": ("self_attn_layer_norm",), "after_ffn": ("final_layer_norm",)},
}
_PARTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "ffn.up": ("fc1",),
    "ffn.down": ("fc2",),
}
_OTHERS = {
    "embed.words": "decoder.embed_tokens",
    "adaptive_softmax": "decoder.adaptive_softmax",
    "stack.norm": "decoder.layer_norm",
    "project": "decoder.output_projection",
}
# Buffers without weights, and what is tied to other weights.
_IDLE = r"\.(version|_float_tensor)$|\.embed_positions\.(weights|_float_tensor)$"


def read(path: Path, data: Path | None, windows: str | None) -> Source:
    """The model of a checkpoint, and its dictionary: that in ``data``, or beside it, or where it was trained.

    Raises UsageError for a damaged file, one that holds code, and a model that has no counterpart here.
    """
    if (wrong := whole_files.defect(str(path))) is not None:
        raise UsageError(f"SOURCE must be a file that fairseq-train wrote, unchanged: {path} is damaged ({wrong})")
    try:
        saved = whole_files.read(str(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        rule = "SOURCE must hold tensors and plain values alone, since others could run code"
        raise UsageError(f"{rule}: {path} holds others, or none") from error
    if not isinstance(saved, Mapping):
        raise UsageError(f"SOURCE must be a file that fairseq-train wrote: {path} holds no model")
    model, task = _settings(saved, "model"), _settings(saved, "task")
    arch, tensors = str(model.get("_name") or model.get("arch")), saved.get("model") if model else None
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UsageError(f"SOURCE must be a file that fairseq-train wrote: {path} holds no model")
    kind = ARCH_MODEL_NAME_REGISTRY.get(arch)
    if kind not in ("transformer_lm", "vanilla_lm") or (kind == "vanilla_lm" and model.get("scale_windows")):
        rule = "SOURCE must hold a transformer_lm, or a vanilla_lm without windows"
        raise UsageError(f"{rule}: {path} holds {arch}{' with windows' if kind == 'vanilla_lm' else ''}")
    if kind == "vanilla_lm" and windows is None:
        raise UsageError(f"--scale-windows must be given for a vanilla_lm, which is a model here as it is: got {path}")
    if int(task.get("output_dictionary_size") or -1) >= 0:
        raise UsageError(f"SOURCE must predict all symbols: {path} was trained with --output-dictionary-size")
    folders = [data] if data is not None else [path.parent, Path(str(task.get("data")).split(":")[0])]
    found = next((folder for folder in folders if (folder / "dict.txt").is_file()), None)
    if found is None:
        raise UsageError(f"--data must name the folder with the dict.txt of SOURCE: there is none in {folders[-1]}")
    try:
        kept = tokenizing.kept(found)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"--data must have the dict.txt of SOURCE: {error}") from error
    files = {**kept["files"], "dict.txt": (found / "dict.txt").read_text(encoding="utf-8")}
    today = _of_today(tensors)
    if kind == "vanilla_lm":
        older_names.bring_to_today(today, core.Vanilla)
    stored = {name: Stored(tuple(x.shape), partial(lambda x: x, x)) for name, x in today.items()}
    told = {name: task[name] for name in ("sample_break_mode", "add_bos_token") if task.get(name)}
    told["tokens_per_sample"] = number("SOURCE's tokens_per_sample", task.get("tokens_per_sample"))
    positions = task.get("max_target_positions") or model.get("max_target_positions") or told["tokens_per_sample"]
    told["max_target_positions"] = number("SOURCE's max_target_positions", positions)
    if kind == "vanilla_lm":
        known = VanillaFlags.__dataclass_fields__
        flags = {name: value for name, value in model.items() if name in known and known[name].metadata}
        flags = {name: value for name, value in flags.items() if value != known[name].default}
        flags["scale_windows"] = windows
        own = Names("decoder.core.stack.layers.{}.", {}, {})
        tensor: Tensors = lambda name, weights: weights[f"decoder.core.{name}"]  # noqa: E731
        return Source(flags, told, stored, own.layers_of(stored), tensor, kept["symbols"], files, _IDLE)
    source = _transformer(path, model, told, stored, kept["symbols"], files)
    source.flags["scale_windows"] = windows
    return source


def _transformer(
    path: Path,
    model: Mapping[str, Any],
    task: dict[str, Any],
    stored: dict[str, Stored],
    symbols: Sequence[str],
    files: dict[str, str],
) -> Source:
    """A ``transformer_lm``; settings that it does not have are at the values that fairseq gives them."""
    fields = TransformerLanguageModelConfig.__dataclass_fields__
    defaults = {name: field.default for name, field in fields.items() if not str(field.default).startswith("${")}
    told: dict[str, Any] = {**defaults, **model}
    for name in _REFUSED:
        if told.get(name):
            raise UsageError(f"SOURCE must be without {name}, which no model here has: {path} has {told[name]}")
    for name, flag in {"project_in_dim": "decoder_input_dim", "project_out_dim": "decoder_output_dim"}.items():
        if f"decoder.{name}.weight" in stored:
            raise UsageError(f"SOURCE must have a {flag} that is its decoder_embed_dim: got {told[flag]}")
    before, softmax = bool(told["decoder_normalize_before"]), bool(told["adaptive_softmax_cutoff"])
    # Older ones said the opposite.
    told["tie_adaptive_proj"] = told["tie_adaptive_proj"] or model.get("no_tie_adaptive_proj") is False
    flags = {
        **{name: told[name] for name in _SAME},
        "activation_fn": _ACTIVATIONS.get(str(told["activation_fn"]), str(told["activation_fn"])),
        "activation_dropout": told["activation_dropout"] or told["relu_dropout"] or 0.0,
        "decoder_normalize_after": not before,
        # Before there was a setting, none had that norm.
        "no_decoder_final_norm": before and "decoder.layer_norm.weight" not in stored,
        "positions": "none" if told["no_token_positional_embeddings"] else "learned",
        "scale_embedding": not told["no_scale_embedding"],
        "share_decoder_input_output_embed": bool(told["share_decoder_input_output_embed"]) and not softmax,
    }
    flags |= {name: told[name] for given, names in _ADAPTIVE.items() if told[given] for name in names}
    if flags["share_decoder_input_output_embed"] or softmax:
        stored.pop("decoder.output_projection.weight", None)
    names = Names("decoder.layers.{}.", {**_PARTS, **_NORMS[before]}, _OTHERS)
    places = "decoder.embed_positions.weight"
    if places in stored:
        task["max_target_positions"] = stored[places].shape[0] - PAD - 1
    rows, width = task["max_target_positions"], number("SOURCE's decoder_embed_dim", told["decoder_embed_dim"])
    room = rows - bool(task.get("add_bos_token"))
    task["tokens_per_sample"] = min(task["tokens_per_sample"], room)

    def tensor(name: str, weights: Weights) -> Tensor:
        if name != "embed.positions.weight":
            return names.tensor(name, weights)
        # Position 0 is the row after that of padding.
        if places in weights:
            return weights[places][PAD + 1 :]
        if weights.shapes:
            return torch.empty(rows, width, device="meta")
        return SinusoidalPositionalEmbedding.get_embedding(PAD + 1 + rows, width, PAD)[PAD + 1 :]

    return Source(flags, task, stored, names.layers_of(stored), tensor, symbols, files, _IDLE)


def _settings(saved: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Those of a checkpoint's section; older ones have all in one."""
    if (args := saved.get("args")) is not None:
        return dict(vars(args))
    found = (saved.get("cfg") or {}).get(section)
    return dict(found if isinstance(found, Mapping) else vars(found) if found is not None else {})


def _of_today(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of today's fairseq, where older ones had others."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in (("layer_norms.0", "self_attn_layer_norm"), ("layer_norms.2", "final_layer_norm")):
            name = name.replace(f".{old}.", f".{new}.")
        if name == "decoder.embed_out":
            name = "decoder.output_projection.weight"
        if ".in_proj_" in name:
            for part, rows in zip("qkv", tensor.chunk(3)):
                found[name.replace("in_proj_", f"{part}_proj.")] = rows
        else:
            found[name] = tensor
    return found
