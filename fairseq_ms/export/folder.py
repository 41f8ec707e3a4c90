"""The files of an exported model: configuration, Python, weights, tokenizer and card."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fairseq_ms.core.steps import state_for
from fairseq_ms.export import card, sources, tokenizer
from fairseq_ms.export.tokenizer import WRONG
from fairseq_ms.tools import report
from fairseq_ms.tools.arguments import DRAWN
from fairseq_ms.tools.plain import built
from fairseq_ms.tools.tokenizing import Symbols, lines_of
from fairseq_ms.tools.trained import check_finite

if TYPE_CHECKING:
    from fairseq_ms.core import CausalModel
    from fairseq_ms.tools.tokenizing import Pipeline
    from fairseq_ms.tools.trained import Trained

MODELING = "modeling_fairseq_ms"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
# What ``config.json`` says of it.
PIPELINE = ("level", "tokenise", "language", "blank_lines")


def write(out: Path, checkpoint: Trained, pipeline: Pipeline, args: Namespace) -> None:
    """Write the folder, all of it or nothing; ``args`` are the command's, for the card.

    Raises UsageError for a folder that is not empty.
    """
    with report.new_folder(out) as folder:
        _write_all(folder, checkpoint, pipeline, args)


def _write_all(folder: Path, checkpoint: Trained, pipeline: Pipeline, args: Namespace) -> None:
    from safetensors.torch import save_file

    core = checkpoint.core
    config = configuration(checkpoint)
    if args.no_python:
        del config["auto_map"]
    config["pipeline"] = {name: getattr(pipeline, name) for name in PIPELINE}
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # They stand in no text, so that nothing ends one; the end of a line does not.
    never = [config["bos_token_id"], config["pad_token_id"]]
    if pipeline.level == "hf_tokenizer":
        never += Symbols(lines_of(pipeline), checkpoint.dictionary.symbols).missing()
    generation |= {"suppress_tokens": never, "do_sample": True, **DRAWN}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        report.write_json(folder / name, content)
    report.write_text(folder / "README.md", card.text(checkpoint, pipeline, args, config))
    sources.write(folder, MODELING, *modeling(type(core), type(core.config)))
    # Each tensor once.
    tensors = {**dict(core.named_parameters()), **dict(core.named_buffers())}
    weights = {f"decoder.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes for its user alone.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    tokenizer.write(folder, pipeline, checkpoint.dictionary.symbols, config["max_position_embeddings"])
    for file in folder.glob("*.py") if args.no_python else ():
        file.unlink()


def read(folder: Path) -> tuple[CausalModel, dict[str, Any]]:
    """The model of an exported folder in evaluation mode, and its ``config.json``; none of the folder's code runs.

    Raises UsageError where the folder is none that ``write`` made.
    """
    report.require_package("safetensors", "an exported model", "safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model = built(config["architectures"][0].removesuffix("ForCausalLM"), config["model"])
        weights = load_file(folder / "model.safetensors")
        state = {name.removeprefix("decoder."): weights[name] for name in weights}
        state |= {new.removeprefix("decoder."): weights[old] for new, old in config["tied"].items()}
        model.load_state_dict(state)
        model.to(_DTYPES[config["dtype"]])
        # Folders of earlier versions name one alone.
        config.setdefault("begin_token_id", config["bos_token_id"])
        if not 0 <= config["begin_token_id"] < model.config.vocab_size:
            raise ValueError(f"a text must begin with a symbol: got {config['begin_token_id']}")
    except (*WRONG, AttributeError, SafetensorError) as error:
        raise tokenizer.unlike_written(folder, error) from error
    check_finite(model, folder)
    return model.eval(), config


def class_name(core: type[nn.Module]) -> str:
    """What the exported class is called: ``Retina`` becomes ``RetinaForCausalLM``."""
    return core.__name__ + "ForCausalLM"


def modeling(core: type[nn.Module], config: type) -> tuple[list[tuple[str, str]], str]:
    """The Python file of a model of the core with this configuration: imports, and the text after them.

    The configuration names the model: ``transformers`` tells classes apart by the text of their files, and takes one
    configuration's model to be that of every folder with the same.
    """
    name = class_name(core)
    imports = [
        (core.__module__, core.__name__),
        (config.__module__, config.__name__),
        *(("fairseq_ms.export.hf.causal_lm", name) for name in ("FairseqMsConfig", "FairseqMsForCausalLM")),
    ]
    if (state := state_for(core)) is not None:
        # Which the steps of generation find where it is imported.
        imports.append((state.__module__, state.__name__))
    text = f'''class {name}Config(FairseqMsConfig):
    """The configuration of ``{name}``."""


class {name}(FairseqMsForCausalLM):
    """``{core.__name__}`` as a causal language model."""

    config_class = {name}Config
    core_class = {core.__name__}
    core_config = {config.__name__}
'''
    return imports, text


def configuration(checkpoint: Trained) -> dict[str, Any]:
    """``config.json``."""
    core, words = checkpoint.core, checkpoint.dictionary
    name = class_name(type(core))
    first = {id(parameter): f"decoder.{own}" for own, parameter in core.named_parameters()}
    every = core.named_parameters(remove_duplicate=False, prefix="decoder")
    tied = {other: first[id(parameter)] for other, parameter in every if first[id(parameter)] != other}
    return {
        "architectures": [name],
        "auto_map": {"AutoConfig": f"{MODELING}.{name}Config", "AutoModelForCausalLM": f"{MODELING}.{name}"},
        "model_type": "fairseq_ms",
        "arch": checkpoint.arch,
        "model": core.config.to_dict(),
        "flags": checkpoint.flags(),
        "tied": tied,
        "tie_word_embeddings": bool(tied),
        "vocab_size": len(words),
        "max_position_embeddings": core.max_length(),
        "tokens_per_sample": checkpoint.segment,
        "bos_token_id": words.bos(),
        "eos_token_id": words.bos(),
        "begin_token_id": words.bos() if checkpoint.adds_bos else words.eos(),
        "pad_token_id": words.pad(),
        "dtype": str(next(core.parameters()).dtype).removeprefix("torch."),
    }
