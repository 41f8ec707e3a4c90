"""Text as a model's symbols: the pipeline that its data went through, as `transformers` wants a tokenizer.

A tokenizer is one of the levels below, perhaps behind ``Moses``. Every line of a text ends in the dictionary's symbol
for that, as in the data, and a text begins with the symbol that fairseq begins with, by default the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from sacremoses import MosesDetokenizer
from transformers import PreTrainedTokenizer

from fairseq_ms_pipeline.bpe import Segmenter
from fairseq_ms_pipeline.segment import byte_symbols, characters, undone
from fairseq_ms_pipeline.text import SPACE, spelled
from fairseq_ms_pipeline.tokenise import tokenised


class LineTokenizer(PreTrainedTokenizer):
    """What the levels share; a subclass says how a tokenised line becomes symbols.

    Args:
        vocab_file: a JSON list of the dictionary's symbols in their order, fairseq's four special ones first
        language: of Moses
    """

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "vocab.json"}
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]
    level: ClassVar[str]

    def __init__(self, vocab_file: str, language: str = "en", **settings: Any) -> None:
        self.symbols: list[str] = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        self.indices = {symbol: index for index, symbol in enumerate(self.symbols)}
        self.language = language
        super().__init__(language=language, **settings)

    def tokenised(self, line: str) -> str:
        """Words, separated by single spaces."""
        return spelled(line, self.level)

    def segmented(self, line: str) -> str:
        """A tokenised line's symbols, separated by single spaces."""
        return line

    def plain(self, line: str) -> str:
        """The text of a tokenised line."""
        return line

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def get_vocab(self) -> dict[str, int]:
        return {**self.indices, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        first, *lines = text.split("\n")
        symbols = self.segmented(self.tokenised(first)).split()
        for line in lines:
            symbols += [self.eos_token, *self.segmented(self.tokenised(line)).split()]
        return symbols

    def _convert_token_to_id(self, token: str) -> int:
        return self.indices.get(token, self.indices["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        lines: list[list[str]] = [[]]
        for token in tokens:
            if token == self.eos_token:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(self.plain(undone(" ".join(line), self.level)) for line in lines)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """The symbol that a text begins with, and the text."""
        return [self.bos_token_id, *token_ids_0, *(token_ids_1 or [])]

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        special = set(self.all_special_ids)
        if already_has_special_tokens:
            return [int(token in special) for token in token_ids_0]
        return [1] + [0] * (len(token_ids_0) + len(token_ids_1 or []))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}vocab.json"
        path.write_text(json.dumps(self.symbols, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
        return (str(path),)


class Words(LineTokenizer):
    """Words as white space separates them."""

    level = "word"


class Subwords(LineTokenizer):
    """Subwords of subword-nmt; ``codes_file`` holds its operations."""

    level = "bpe"
    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "vocab.json", "codes_file": "codes.bpe"}

    def __init__(self, vocab_file: str, codes_file: str, **settings: Any) -> None:
        self.codes = Path(codes_file).read_text(encoding="utf-8")
        self.segmenter = Segmenter(Path(codes_file))
        super().__init__(vocab_file, **settings)

    def segmented(self, line: str) -> str:
        return self.segmenter.line(line)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}codes.bpe"
        path.write_text(self.codes, encoding="utf-8")
        return (*super().save_vocabulary(save_directory, filename_prefix), str(path))


class Characters(LineTokenizer):
    """Characters; a space is a symbol of its own, that behind the last word too."""

    level = "char"

    def segmented(self, line: str) -> str:
        return characters(line)

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        symbols = super()._tokenize(text)
        return [*symbols, SPACE] if text.strip() and text.endswith(" ") else symbols


class Bytes(Characters):
    """Bytes of UTF-8."""

    level = "byte"

    def segmented(self, line: str) -> str:
        return byte_symbols(line)


class Moses(LineTokenizer):
    """Moses in front of a level, and undone behind it."""

    def tokenised(self, line: str) -> str:
        return tokenised(line, "moses", self.language, self.level)

    def plain(self, line: str) -> str:
        return MosesDetokenizer(lang=self.language).detokenize(line.split(), unescape=False)
