"""Lines of text as words, by Moses or by white space."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fairseq_ms_pipeline.lines import Lines
from fairseq_ms_pipeline.text import spelled


@lru_cache(maxsize=4)
def _moses(language: str) -> Any:
    from sacremoses import MosesTokenizer

    tokenizer = MosesTokenizer(lang=language)
    # sacremoses makes this set for every word that ends in a full stop, a third of its time.
    tokenizer.islower = frozenset(MosesTokenizer.IsLower).issuperset
    return tokenizer


def tokenised(line: str, how: str, language: str, level: str = "bpe") -> str:
    """One line's words, separated by single spaces; `how` is `moses` or `none` (white space decides)."""
    if how == "moses":
        line = _moses(language).tokenize(line, escape=False, return_str=True)
    return spelled(line, level)


class Moses(Lines):
    """Moses in front of a level, and undone after it."""

    def tokenised(self, line: str) -> str:
        return tokenised(line, "moses", self.language, self.level)

    def plain(self, line: str) -> str:
        from sacremoses import MosesDetokenizer

        return MosesDetokenizer(lang=self.language).detokenize(line.split(), unescape=False)
