"""The pipeline of a model's data as `transformers` wants a tokenizer.

A text begins with the symbol that fairseq begins with, by default that of the end of a line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from fairseq_ms.export.hf.symbols import Lines
from fairseq_ms_pipeline.bpe import Segmenter


class LineTokenizer(Lines, PreTrainedTokenizer):
    """A tokenizer whose symbols come from a pipeline; a subclass derives from the pipeline's classes first.

    Args:
        vocab_file: a JSON list of the dictionary's symbols in their order, fairseq's four special ones first
        language: of Moses
    """

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "vocab.json"}
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, language: str = "en", **settings: Any) -> None:
        self.symbols: list[str] = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        self.indices = {symbol: index for index, symbol in enumerate(self.symbols)}
        self.language = language
        # What looks like a special symbol in a text is for the pipeline to spell, as in the data.
        super().__init__(language=language, **{"split_special_tokens": True, **settings})

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def get_vocab(self) -> dict[str, int]:
        return {**self.indices, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return self.symbols_of(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.indices.get(token, self.indices["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.text_of(tokens)

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


class SubwordTokenizer(LineTokenizer):
    """The same with a file of subword-nmt's operations."""

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "vocab.json", "codes_file": "codes.bpe"}

    def __init__(self, vocab_file: str, codes_file: str, **settings: Any) -> None:
        self.codes = Path(codes_file).read_text(encoding="utf-8")
        self.segmenter = Segmenter(Path(codes_file))
        super().__init__(vocab_file, **settings)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}codes.bpe"
        path.write_text(self.codes, encoding="utf-8")
        return (*super().save_vocabulary(save_directory, filename_prefix), str(path))
