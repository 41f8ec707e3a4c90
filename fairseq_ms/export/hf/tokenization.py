"""The pipeline of a model's data as `transformers` wants a tokenizer.

A text begins with `<s>`. The end of a line is no special token, which decoding may leave out.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from fairseq_ms_pipeline.lines import Lines


class LineTokenizer(Lines, PreTrainedTokenizer):
    """A tokenizer whose symbols come from a pipeline; a subclass derives from the pipeline's classes first.

    Args:
        vocab_file: a JSON list of the dictionary's symbols in their order, fairseq's four special ones first
        codes_file: the operations of subword-nmt, where there are any
        language: of Moses
    """

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "vocab.json", "codes_file": "codes.bpe"}
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, codes_file: str | None = None, language: str = "en", **settings: Any) -> None:
        self.symbols: list[str] = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        self.indices = {symbol: index for index, symbol in enumerate(self.symbols)}
        self.language, self.codes_file = language, codes_file
        # What looks like a special symbol in a text is for the pipeline to spell, as in the data.
        super().__init__(language=language, **{"split_special_tokens": True, **settings})

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def get_vocab(self) -> dict[str, int]:
        return {**self.indices, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        """The symbols of a text, in which tokens that were added stay whole, unless they are special."""
        added = self._added()
        parts = re.split(f"({'|'.join(map(re.escape, added))})", text) if added else [text]
        return [symbol for part in parts for symbol in ([part] if part in added else self.symbols_of(part))]

    def _added(self) -> list[str]:
        """Tokens that are no special ones, the longest first."""
        added = [str(token) for token in self.added_tokens_decoder.values() if not token.special]
        return sorted(added, key=len, reverse=True)

    def _convert_token_to_id(self, token: str) -> int:
        return self.indices.get(token, self.indices["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        parts = groupby(tokens, self._added().__contains__)
        # Spaces as transformers 4.57 has them, which asks for the parts without.
        return " ".join(" ".join(part) if added else self.text_of(part) for added, part in parts)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """The symbol that a text begins with, and the text."""
        return [self.bos_token_id, *token_ids_0, *(token_ids_1 or [])]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        special = set(self.all_special_ids)
        if already_has_special_tokens:
            return [int(token in special) for token in token_ids_0]
        return [1] + [0] * (len(token_ids_0) + len(token_ids_1 or []))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        texts = {"vocab.json": json.dumps(self.symbols, ensure_ascii=False, indent=0) + "\n"}
        if self.codes_file is not None:
            texts["codes.bpe"] = Path(self.codes_file).read_text(encoding="utf-8")
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        paths = {name: Path(save_directory) / (prefix + name) for name in texts}
        for name, text in texts.items():
            paths[name].write_text(text, encoding="utf-8")
        return tuple(map(str, paths.values()))
