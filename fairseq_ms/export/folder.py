"""The files of an exported model: configuration, Python, weights, tokenizer and card."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_ms.errors import UsageError
from fairseq_ms.export import card, tokenizer
from fairseq_ms.export.card import Facts
from fairseq_ms.export.hf.weights import keep_derived_buffers, tied_names
from fairseq_ms.export.sources import Name, collected
from fairseq_ms.version import __version__

if TYPE_CHECKING:
    from fairseq_ms.analysis.checkpoints import Checkpoint
    from fairseq_ms.export.tokenizer import Pipeline

MODELING, CONFIGURATION = "modeling_fairseq_ms", "configuration_fairseq_ms"

_TEMPLATES = "fairseq_ms.export.hf"
_BESIDE = {f"{_TEMPLATES}.configuration": CONFIGURATION}


def write(out: Path, checkpoint: Checkpoint, pipeline: Pipeline, facts: Facts) -> None:
    """Write the folder, all of it or nothing; it must not exist or be empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"OUT must be a folder that does not exist or is empty: got {out}")
    unfinished = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        _write_all(unfinished, checkpoint, pipeline, facts)
        if out.exists():
            out.rmdir()
        unfinished.replace(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_all(folder: Path, checkpoint: Checkpoint, pipeline: Pipeline, facts: Facts) -> None:
    from safetensors.torch import save_file

    core = checkpoint.model.decoder.core
    config = configuration(checkpoint)
    made = f"Written by fairseq-ms export {__version__} from the sources named below; change those and export again."
    files = {
        f"{CONFIGURATION}.py": configuration_source(type(core), made),
        f"{MODELING}.py": modeling(type(core), type(core.config), made),
        "config.json": _json(config),
        "generation_config.json": _json(generation_configuration(config)),
        "README.md": card.text(checkpoint, pipeline, facts, config),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_file(weights(core), folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes for its user alone.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    words = checkpoint.dictionary
    begin = words.symbols[config["bos_token_id"]]
    positions = config["max_position_embeddings"]
    tokenizer.write(folder, pipeline, words.symbols, begin, positions, f"The tokenizer.\n\n{made}\n")


def _json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def class_name(core: type[nn.Module]) -> str:
    """What the exported class is called: ``Retina`` becomes ``RetinaForCausalLM``."""
    return core.__name__ + "ForCausalLM"


def configuration_source(core: type[nn.Module], made: str) -> str:
    """The Python file of the configuration.

    It names the model: ``transformers`` tells classes apart by the text of their files, and takes one configuration's
    model to be that of every folder with the same.
    """
    docstring = f"The configuration of ``{class_name(core)}``.\n\n{made}\n"
    return collected([Name(f"{_TEMPLATES}.configuration", "FairseqMsConfig")], docstring, {})


def modeling(core: type[nn.Module], config: type, made: str) -> str:
    """The Python file of a model of the core with this configuration."""
    ending = (
        f"class {class_name(core)}(FairseqMsForCausalLM):\n"
        f'    """``{core.__name__}`` as a causal language model."""\n\n'
        f"    core_class = {core.__name__}\n"
        f"    core_config = {config.__name__}"
    )
    own = [Name(kind.__module__, kind.__name__) for kind in (core, config)]
    roots = [*own, Name(f"{_TEMPLATES}.modeling", "FairseqMsForCausalLM")]
    return collected(roots, f"``{class_name(core)}``.\n\n{made}\n", _BESIDE, ending)


def weights(core: nn.Module) -> dict[str, Tensor]:
    """All tensors of the model, each once, by their names in the exported one."""
    keep_derived_buffers(core)
    tied = tied_names(core)
    state = core.state_dict()
    return {f"decoder.{name}": tensor.cpu().contiguous() for name, tensor in state.items() if name not in tied}


def configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json``."""
    decoder, words = checkpoint.model.decoder, checkpoint.dictionary
    known: Any = OmegaConf.to_container(checkpoint.cfg.model, resolve=True, enum_to_str=True)
    flags = {name: value for name, value in known.items() if not name.startswith("_") and name != "criterion"}
    bos = int(checkpoint.adds_bos)
    # As the model was built, wherever the numbers came from.
    flags |= {
        "add_bos_token": bool(bos),
        "tokens_per_sample": checkpoint.segment,
        "max_target_positions": decoder.positions + bos,
    }
    name = class_name(type(decoder.core))
    tied = {f"decoder.{name}": f"decoder.{first}" for name, first in tied_names(decoder.core).items()}
    return {
        "architectures": [name],
        "auto_map": {
            "AutoConfig": f"{CONFIGURATION}.FairseqMsConfig",
            "AutoModelForCausalLM": f"{MODELING}.{name}",
        },
        "model_type": "fairseq_ms",
        "arch": str(checkpoint.cfg.model._name),
        "model": decoder.core.config.to_dict(),
        "flags": flags,
        "tied": tied,
        "vocab_size": len(words),
        "max_position_embeddings": None if decoder.core.max_length() is None else decoder.positions + bos,
        "bos_token_id": words.bos() if bos else words.eos(),
        "eos_token_id": words.eos(),
        "pad_token_id": words.pad(),
        "tie_word_embeddings": bool(tied),
        "dtype": str(next(decoder.parameters()).dtype).removeprefix("torch."),
    }


def generation_configuration(config: dict[str, Any]) -> dict[str, Any]:
    """``generation_config.json``: as fairseq generates, never the padding symbol and never nothing at all."""
    return {
        **{name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "suppress_tokens": [config["pad_token_id"]],
        "min_length": 2,
    }


def check(checkpoint: Checkpoint) -> None:
    """Raise UsageError for a model that cannot be exported."""
    if len(checkpoint.task.source_dictionary) != len(checkpoint.task.target_dictionary):
        raise UsageError(
            "--output-dictionary-size must be that of the input dictionary in a model that is exported: got "
            f"{len(checkpoint.task.target_dictionary)} symbols for {len(checkpoint.task.source_dictionary)}"
        )
