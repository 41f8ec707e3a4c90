"""Prompts are tokenised and segmented as the data was, by the pipeline in the data folder's ``manifest.json``.

fairseq's own tokenizers come near to that with the right flags, which are easily forgotten. With a manifest the flags
are not needed, and refused if they contradict it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq import tasks, utils
from fairseq.data import encoders
from fairseq.registry import REGISTRIES
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import DictConfig, OmegaConf

from fairseq_ms.errors import UsageError
from fairseq_ms.host import rules
from fairseq_ms.tools import tokenizing
from fairseq_ms_pipeline.files import sha256_of
from fairseq_ms_pipeline.manifest import encoders_of

NAME = "prepared"
# The groups of a configuration that are read, of which a program of one's own may have none.
_READ = ("task", "tokenizer", "bpe", "common_eval")
_DEFAULTS = {group: REGISTRIES[group]["dataclass_registry"] for group in ("tokenizer", "bpe")}


class Prepared:
    """The pipeline of a data folder as fairseq calls a BPE; there is no tokenizer in front of it.

    The configuration has the folder, how words are told apart, and whether symbols are undone before ``decode``.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.lines = tokenizing.lines_of(tokenizing.pipeline_of(Path(cfg.data), None, cfg.tokenise, None, None))
        self.is_text = cfg.is_text

    def encode(self, text: str) -> str:
        """The symbols of a line, separated by spaces; UsageError for several, of which fairseq continues the first."""
        if "\n" in (line := text.removesuffix("\n")):
            raise UsageError(
                "a prompt must be one line (score takes several with replace_newline_with_eos=True): "
                f"got {line.count(chr(10)) + 1}"
            )
        return " ".join(self.lines.symbols_of(line))

    def decode(self, symbols: str) -> str:
        """The text of symbols."""
        return symbols if self.is_text else self.lines.text_of(symbols.split())


def as_prepared(original: Callable[..., None], model: Any, cfg: Any) -> None:
    """``prepare_for_inference_``, after which fairseq builds the tokenizer and the BPE that its configuration names.

    Raises UsageError for flags that contradict the manifest, or have no meaning for a model of this package.
    """
    if rules.is_ours(model):
        rules.refuse_idle(cfg.generation)
    original(model, cfg)
    chosen = cfg.task if isinstance(cfg, DictConfig) and not set(_READ) - cfg.keys() else None
    name, folders = getattr(chosen, "_name", None), getattr(chosen, "data", None)
    if not folders or not issubclass(tasks.TASK_REGISTRY.get(name, object), LanguageModelingTask):
        return
    data = Path(utils.split_paths(folders)[0])
    manifest, settings = tokenizing.settings_of(data)
    given = {group: _given(group, cfg[group]) for group in _DEFAULTS}
    if manifest is None or settings.get("level") not in tokenizing.LEVELS or given["bpe"].get("_name") == NAME:
        return
    tokenise, known = settings.get("tokenise"), encoders_of(settings, manifest.parent)
    if given["tokenizer"] == {"_name": "space"}:
        # What is tokenised already is not tokenised again.
        tokenise, known["tokenizer"] = "none", given["tokenizer"]
    for group, own in given.items():
        for name, value in own.items():
            if not _same(value, right := known.get(group, {}).get(name)):
                flag = f"--{group if name == '_name' else name.replace('_', '-')}"
                wanted = f"be {right} or left out" if right else "be left out"
                raise UsageError(f"{flag} must {wanted} with the data that {manifest} describes: got {value}")
    is_text = cfg.common_eval.post_process is not None and settings["level"] in ("char", "byte")
    encoders.BPE_REGISTRY[NAME] = Prepared
    cfg.tokenizer, cfg.bpe = None, {"_name": NAME, "data": str(data), "tokenise": tokenise, "is_text": is_text}


def _given(group: str, chosen: Any) -> dict[str, Any]:
    """The name of the chosen class and its settings that differ from the defaults; empty without a choice."""
    if not isinstance(chosen, DictConfig):
        return {} if chosen is None else {"_name": chosen}
    settings: dict[str, Any] = OmegaConf.to_container(chosen)  # type: ignore[assignment]
    usual = vars(_DEFAULTS[group][chosen._name]()) if chosen._name in _DEFAULTS[group] else {}
    return {name: value for name, value in settings.items() if name == "_name" or value != usual.get(name)}


def _same(value: Any, right: Any) -> bool:
    """Whether two settings are equal, or name files with the same content."""
    files = [Path(str(one)) for one in (value, right)]
    return value == right or (all(file.is_file() for file in files) and len({*map(sha256_of, files)}) == 1)
