"""Lines of text as words, by Moses or by white space."""

from __future__ import annotations

from functools import lru_cache

from sacremoses import MosesDetokenizer, MosesTokenizer

from fairseq_ms_pipeline.lines import Lines
from fairseq_ms_pipeline.text import spelled


class _Tokenizer(MosesTokenizer):
    """sacremoses makes a set of all small letters for every word that ends in a full stop, a third of its time."""

    _SMALL = frozenset(MosesTokenizer.IsLower)

    def islower(self, text: str) -> bool:
        return self._SMALL.issuperset(text)


@lru_cache(maxsize=4)
def _moses(language: str) -> MosesTokenizer:
    return _Tokenizer(lang=language)


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
        return MosesDetokenizer(lang=self.language).detokenize(line.split(), unescape=False)
