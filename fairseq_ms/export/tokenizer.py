"""Which pipeline a model's data went through, and the files of a tokenizer that repeats it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_ms.analysis import report
from fairseq_ms.errors import UsageError
from fairseq_ms.export.sources import Name, collected

if TYPE_CHECKING:
    from fairseq_ms.export.hf.symbols import Lines

LEVELS = {"word": "Words", "bpe": "Subwords", "char": "Characters", "byte": "Bytes"}

_SYMBOLS = "fairseq_ms.export.hf.symbols"
_TOKENIZERS = "fairseq_ms.export.hf.tokenization"


@dataclass(frozen=True)
class Pipeline:
    """How text became symbols.

    Attributes:
        level: a key of ``LEVELS``
        tokenise: ``moses`` or ``none``
        language: of Moses
        codes: the BPE operations, with the level ``bpe``
    """

    level: str
    tokenise: str
    language: str
    codes: Path | None

    @property
    def packages(self) -> list[str]:
        """What the tokenizer needs beside ``transformers``."""
        return ["sacremoses"] * (self.tokenise == "moses") + ["subword-nmt"] * (self.level == "bpe")


def pipeline_of(
    data: Path, level: str | None, tokenise: str | None, language: str | None, codes: Path | None
) -> Pipeline:
    """The pipeline that the flags name, and where they do not, the ``manifest.json`` in or above the data folder.

    Raises UsageError where neither says what the symbols are, on values that do not exist, and on a missing file.
    """
    manifest = next((file for file in (data / "manifest.json", data.parent / "manifest.json") if file.is_file()), None)
    try:
        known = json.loads(manifest.read_text(encoding="utf-8"))["settings"] if manifest is not None else {}
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"--data must be as fairseq-ms prepare wrote it: {manifest} is damaged ({error})") from error
    level = level or known.get("level")
    if level not in LEVELS:
        raise UsageError(
            f"--level must be one of {', '.join(LEVELS)} where no manifest.json of preprocess/ lies in or above "
            f"{data}: got {level or 'none'}"
        )
    tokenise = tokenise or known.get("tokenise", "none")
    if level != "bpe" and codes is not None:
        raise UsageError(f"--bpe-codes has no effect with --level {level}: got {codes}")
    if level == "bpe" and codes is None and manifest is not None:
        codes = manifest.parent / "codes.bpe"
    if level == "bpe" and (codes is None or not codes.is_file()):
        raise UsageError(f"--bpe-codes must name the file of BPE operations with --level bpe: got {codes or 'none'}")
    if language is not None and tokenise != "moses":
        raise UsageError(f"--language has no effect without --tokenise moses: got {language}")
    return Pipeline(level, tokenise, language or known.get("language", "en"), codes)


def classes_of(pipeline: Pipeline) -> list[str]:
    """The classes of ``hf/symbols.py`` that make up the pipeline, the first derived from first."""
    return ["Moses"] * (pipeline.tokenise == "moses") + [LEVELS[pipeline.level]]


def lines_of(pipeline: Pipeline) -> Lines:
    """The pipeline, to be used here; raises UsageError where a package is missing."""
    # Moses and subword-nmt are optional.
    report.require_package("sacremoses", "the pipeline of preprocess/", "sacremoses")
    report.require_package("subword_nmt", "the pipeline of preprocess/", "subword-nmt")
    from fairseq_ms.export.hf import symbols

    lines = type("Pipeline", tuple(getattr(symbols, name) for name in classes_of(pipeline)), {})()
    lines.language = pipeline.language
    if pipeline.codes is not None:
        lines.segmenter = symbols.Segmenter(pipeline.codes)
    assert isinstance(lines, symbols.Lines)
    return lines


def source(pipeline: Pipeline, docstring: str) -> str:
    """The Python file of the tokenizer, whose class is ``FairseqMsTokenizer``."""
    bases = [Name(_SYMBOLS, name) for name in classes_of(pipeline)]
    bases.append(Name(_TOKENIZERS, "SubwordTokenizer" if pipeline.level == "bpe" else "LineTokenizer"))
    ending = (
        f"class FairseqMsTokenizer({', '.join(base.name for base in bases)}):\n"
        '    """The tokenizer of this folder\'s model."""\n\n'
        f"    vocab_files_names = {bases[-1].name}.vocab_files_names"
    )
    return collected(bases, docstring, {}, ending)


def write(
    folder: Path, pipeline: Pipeline, symbols: Sequence[str], begin: str, positions: int | None, docstring: str
) -> None:
    """Write the tokenizer's files; a text begins with the symbol ``begin``."""
    (folder / "tokenization_fairseq_ms.py").write_text(source(pipeline, docstring), encoding="utf-8")
    vocabulary = json.dumps(list(symbols), ensure_ascii=False, indent=0)
    (folder / "vocab.json").write_text(vocabulary + "\n", encoding="utf-8")
    if pipeline.codes is not None:
        (folder / "codes.bpe").write_bytes(pipeline.codes.read_bytes())
    settings: dict[str, object] = {
        "tokenizer_class": "FairseqMsTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_fairseq_ms.FairseqMsTokenizer", None]},
        "bos_token": begin,
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "language": pipeline.language,
    }
    if positions is not None:
        settings["model_max_length"] = positions
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
