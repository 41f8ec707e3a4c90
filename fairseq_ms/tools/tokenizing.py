"""Which pipeline a model's data went through, and that pipeline for other texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_ms.errors import UsageError
from fairseq_ms.tools import report
from fairseq_ms_pipeline.files import parsed
from fairseq_ms_pipeline.indexed import SPECIAL, read_symbols
from fairseq_ms_pipeline.plain_bytes import Bytes, spelled_bytes

if TYPE_CHECKING:
    from fairseq_ms_pipeline.lines import Lines

LEVELS = ("word", "bpe", "hf_byte_bpe", "hf_tokenizer", "char", "byte")
# What BPE has learnt is in this file of a prepared folder; beside that of hf_byte_bpe is its vocab.json.
CODES = {"bpe": "codes.bpe", "hf_byte_bpe": "merges.txt", "hf_tokenizer": "tokenizer.json"}


@dataclass(frozen=True)
class Pipeline:
    """How text became symbols.

    Attributes:
        level: one of ``LEVELS``
        tokenise: ``moses`` or ``none``
        language: of Moses
        codes: the BPE operations, with the levels of ``CODES``
        blank_lines: ``keep`` or ``drop``
    """

    level: str
    tokenise: str
    language: str
    codes: Path | None
    blank_lines: str = "keep"

    @property
    def packages(self) -> list[str]:
        """What the tokenizer needs beside ``transformers``."""
        of_level = {"bpe": ["subword-nmt"], "hf_byte_bpe": ["tokenizers"], "hf_tokenizer": ["tokenizers"]}
        return ["sacremoses"] * (self.tokenise == "moses") + of_level.get(self.level, [])


def manifest_of(data: Path) -> Path | None:
    """The ``manifest.json`` in or above a data folder, which may be a half; None where there is none."""
    above = (data, data.parent, data.parent.parent) if data.parent.name == "halves" else (data, data.parent)
    return next((folder / "manifest.json" for folder in above if (folder / "manifest.json").is_file()), None)


def settings_of(data: Path) -> tuple[Path | None, dict[str, Any]]:
    """The ``manifest.json`` in or above a data folder, and the settings in it; UsageError for a damaged one."""
    manifest = manifest_of(data)
    try:
        known = dict(parsed(manifest.read_text(encoding="utf-8"))["settings"]) if manifest is not None else {}
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"--data must be as fairseq-ms prepare wrote it: {manifest} is damaged ({error})") from error
    return manifest, known


def pipeline_of(
    data: Path, level: str | None, tokenise: str | None, language: str | None, bpe_codes: str | Path | None
) -> Pipeline:
    """The pipeline that the flags name, and where they do not, the manifest of the data folder.

    Raises UsageError where neither says what the symbols are, on values that do not exist, and on a missing file.
    """
    manifest, known = settings_of(data)
    level = level or known.get("level")
    if level not in LEVELS:
        raise UsageError(
            f"--level must be one of {', '.join(LEVELS)} where no manifest.json of preprocess/ lies in or above "
            f"{data}: got {level or 'none'}"
        )
    tokenise = tokenise or known.get("tokenise", "none")
    codes = Path(bpe_codes) if bpe_codes is not None else None
    if level not in CODES and codes is not None:
        raise UsageError(f"--bpe-codes has no effect with --level {level}: got {codes}")
    if level in CODES and codes is None and manifest is not None:
        codes = manifest.parent / CODES[level]
    if level in CODES and (codes is None or not codes.is_file()):
        raise UsageError(
            f"--bpe-codes must name the file of BPE operations with --level {level}: got {codes or 'none'}"
        )
    if level == "hf_byte_bpe" and codes is not None and not codes.with_name("vocab.json").is_file():
        raise UsageError(f"--bpe-codes must have its vocab.json beside it with --level {level}: got {codes}")
    if level == "hf_byte_bpe" and codes is not None and codes.name != CODES[level]:
        raise UsageError(f"--bpe-codes must be a {CODES[level]} with --level {level}: got {codes}")
    if language is not None and tokenise != "moses":
        raise UsageError(f"--language has no effect without --tokenise moses: got {language}")
    language = language or known.get("language", "en")
    return Pipeline(level, tokenise, language, codes, known.get("blank_lines", "keep"))


def classes_of(pipeline: Pipeline, last: tuple[str, str]) -> list[tuple[str, str]]:
    """The modules and names of the classes that make up the pipeline, the first derived from first."""
    moses, subwords = ("fairseq_ms_pipeline.moses", "Moses"), ("fairseq_ms_pipeline.subwords", "Subwords")
    levels = {"bpe": [subwords], "hf_byte_bpe": [("fairseq_ms_pipeline.byte_bpe", "ByteSubwords")]}
    levels["hf_tokenizer"] = [("fairseq_ms_pipeline.hf_tokenizer", "TokenizerLines")]
    return [moses] * (pipeline.tokenise == "moses") + levels.get(pipeline.level, []) + [last]


def lines_of(pipeline: Pipeline) -> Lines:
    """The pipeline, to be used here; raises UsageError where a package is missing."""
    if pipeline.codes is not None and pipeline.level == "hf_byte_bpe" and not _learnt(pipeline.codes):
        learnt_nothing = Bytes()
        learnt_nothing.codes_file = pipeline.codes
        return learnt_nothing
    for package in pipeline.packages:
        report.require_package(package.replace("-", "_"), "the pipeline of preprocess/", package)
    classes = classes_of(pipeline, ("fairseq_ms_pipeline.lines", "Lines"))
    lines = type("Pipeline", tuple(getattr(import_module(module), name) for module, name in classes), {})()
    lines.level, lines.language, lines.codes_file = pipeline.level, pipeline.language, pipeline.codes
    return lines


def _learnt(merges: Path) -> bool:
    """Whether a file of byte-level BPE has operations."""
    return any(line and not line.startswith("#version") for line in merges.read_text(encoding="utf-8").split("\n"))


def kept(data: Path) -> dict[str, Any]:
    """What a model's file keeps of its tokenizer: "symbols", and the text of "files" that ``pipeline_of`` reads.

    Args:
        data: a folder with a dictionary, which has a manifest in or above it where it was prepared here, or a text,
            whose bytes are tokens 4 to 259, and its ends of lines 2: byte-level BPE that has learnt nothing
    """
    if data.is_dir():
        manifest, known = settings_of(data)
        above = manifest.parent if manifest is not None else data
        files = {name: above / name for name in ("vocab.json", *CODES.values())}
        texts = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
        symbols = read_symbols(data / "dict.txt")
    else:
        known = {"level": "hf_byte_bpe"}
        spelled = {token: byte for byte, token in enumerate(spelled_bytes())}
        texts = {"vocab.json": json.dumps(spelled), "merges.txt": "#version: 0.2\n"}
        symbols = [*SPECIAL, *map(str, range(256))]
    return {"symbols": symbols, "files": {"manifest.json": json.dumps({"settings": known}), **texts} if known else {}}


class Symbols:
    """Text as a model's tokens and back.

    Args:
        lines: the pipeline
        symbols: the dictionary's, in their order
    """

    def __init__(self, lines: Lines, symbols: Sequence[str]) -> None:
        self.lines, self.symbols = lines, symbols
        self.numbers = {symbol: number for number, symbol in enumerate(symbols)}
        self.of_bytes = {self.numbers[symbol] for symbol in lines.of_bytes if symbol in self.numbers}

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a text, without a first symbol; what the dictionary lacks is the unknown one."""
        unknown = self.numbers["<unk>"]
        return [self.numbers.get(symbol, unknown) for symbol in self.lines.symbols_of(text)]

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.lines.text_of(self.symbols[token] for token in tokens)

    def missing(self) -> list[int]:
        """The tokens whose symbol is a number that the tokenizer of the data does not have."""
        if self.lines.level != "hf_tokenizer":
            return []
        tokenizer: Any = getattr(self.lines, "tokenizer", None)
        numbers = [symbol for symbol in self.symbols if symbol.isdecimal()]
        return [self.numbers[number] for number in numbers if tokenizer.id_to_token(int(number)) is None]


class FastSymbols:
    """What ``Symbols`` is, by the ``tokenizer.json`` of an exported folder."""

    def __init__(self, file: Path) -> None:
        report.require_package("tokenizers", "an exported model of --bpe hf_byte_bpe", "tokenizers")
        from tokenizers import Tokenizer

        try:
            self.tokenizer = Tokenizer.from_file(str(file))
            self.tokenizer.encode_special_tokens = True
        except Exception as error:  # tokenizers has none of its own
            raise ValueError(f"{file.name}: {error}") from error
        self.of_bytes = set[int]()
        self.symbols = [str(self.tokenizer.id_to_token(number)) for number in range(self.tokenizer.get_vocab_size())]

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a text, without a first symbol."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def missing(self) -> list[int]:
        """None: it has a token for each of ``symbols``."""
        return []
