"""Lines as the tokens of any `tokenizer.json` of Hugging Face's tokenizers; a symbol is a token's number."""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from fairseq_ms_pipeline.lines import Lines


def load(file: Path) -> Tokenizer:
    """The tokenizer of a file; ValueError for one that the library does not read."""
    # A worker has one processor, and no thread of the process that it was forked from.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"--vocab-from {file} must be a tokenizer.json that tokenizers reads: {error}.") from None
    # Lines are whole, and what looks like a special token in them is text.
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = True
    return found


def symbols(file: Path) -> list[str]:
    """All symbols: a number for each token, and for those between them that have none."""
    return [str(number) for number in range(max(load(file).get_vocab().values(), default=-1) + 1)]


def reads(tokenizer: Tokenizer, line: str) -> bool:
    """Whether a tokenizer has tokens for all of a line, or an unknown one."""
    try:
        tokenizer.encode(line, add_special_tokens=False)
    except Exception:  # the library raises no narrower one
        return False
    return True


class TokenizerLines(Lines):
    """Lines of the tokens of ``codes_file``, a tokenizer.json."""

    level = "hf_tokenizer"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What splits the lines."""
        return load(Path(str(self.codes_file)))

    @cached_property
    def of_bytes(self) -> set[str]:  # type: ignore[override]
        names = self.tokenizer.get_vocab()
        return {str(number) for name, number in names.items() if re.fullmatch("<0x[0-9A-F]{2}>", name)}

    def segmented(self, line: str) -> str:
        return " ".join(map(str, self.tokenizer.encode(line, add_special_tokens=False).ids))

    def plain(self, line: str) -> str:
        tokens = [int(symbol) for symbol in line.split() if symbol.isdecimal()]
        return self.tokenizer.decode(tokens, skip_special_tokens=False)
