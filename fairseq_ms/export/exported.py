"""The folder that fairseq-ms export writes, of which no code runs here, and the one that comes with this package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fairseq_ms
from fairseq_ms.core import CausalModel
from fairseq_ms.core.ops.device import gains_by_half
from fairseq_ms.errors import UsageError
from fairseq_ms.export import folder, tokenizer
from fairseq_ms.tools import tokenizing
from fairseq_ms.tools.plain import Plain
from fairseq_ms.tools.trained import on_device
from fairseq_ms_pipeline.indexed import BOS

SHIPPED = Path(fairseq_ms.__file__).parent / "shipped"


def shipped() -> str:
    """The folder in the package, which stderr is told of; UsageError where there is none."""
    if not (SHIPPED / "config.json").is_file():
        raise UsageError(
            "CHECKPOINT must be given, a file that training wrote or a folder of fairseq-ms export: got none"
        )
    card = SHIPPED / "README.md"
    print(f"no CHECKPOINT: using the model that comes with the package, described in {card}", file=sys.stderr)
    return str(SHIPPED)


def read(path: Path, cpu: bool) -> tuple[CausalModel, dict[str, Any]]:
    """The model, on a GPU if it may be, and what ``config.json`` says; on a CPU, half precision would only be slow."""
    core, config = folder.read(path)
    on_device(core, cpu)
    return (core if gains_by_half(next(core.parameters()).device) else core.float()), config


class Exported(Plain):
    """An exported model, which is asked about a text."""

    def pipeline(self) -> tuple[tokenizing.Pipeline, tokenizing.Symbols | tokenizing.FastSymbols]:
        return tokenizer.of_folder(Path(self.path), self.saved["config"])


def load(path: str, data: str | None, cpu: bool) -> Exported:
    """The model of a folder; UsageError where ``data`` are no text."""
    if data is None or not Path(data).is_file():
        raise UsageError(f"--data must name a text with an exported folder, such as book.txt: got {data or 'none'}")
    core, config = read(Path(path), cpu)
    symbols, length = tokenizer.of_folder(Path(path), config)[1].symbols, config.get("tokens_per_sample")
    if not isinstance(length, int):
        raise tokenizer.unlike_written(Path(path), ValueError(f"tokens_per_sample must be a number: got {length}"))
    saved = {"tokenizer": {"symbols": symbols, "files": {}}, "length": length, "config": config}
    found = Exported(Path(path).name, path, core, saved, data)
    found.adds_bos = config["begin_token_id"] == BOS
    return found
