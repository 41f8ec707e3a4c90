"""Text as a model's symbols and back: the pipeline that its data went through, line by line.

A pipeline is one of the levels below, perhaps behind ``Moses``. Every line of a text but the last ends in the
dictionary's symbol for that, as in the data; text behind the last line end, if any, is a line without an end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from sacremoses import MosesDetokenizer

from fairseq_ms_pipeline.bpe import Segmenter
from fairseq_ms_pipeline.segment import byte_symbols, characters, undone
from fairseq_ms_pipeline.text import SPACE, spelled
from fairseq_ms_pipeline.tokenise import tokenised

END_OF_LINE = "</s>"


class Lines:
    """What the levels share: a line is tokenised, then segmented."""

    level: ClassVar[str]
    language: str = "en"

    def tokenised(self, line: str) -> str:
        """Words, separated by single spaces."""
        return spelled(line, self.level)

    def segmented(self, line: str) -> str:
        """A tokenised line's symbols, separated by single spaces."""
        return line

    def plain(self, line: str) -> str:
        """The text of a tokenised line."""
        return line

    def symbols_of(self, text: str) -> list[str]:
        """The symbols of a text."""
        first, *lines = text.split("\n")
        symbols = self.segmented(self.tokenised(first)).split()
        for line in lines:
            symbols += [END_OF_LINE, *self.segmented(self.tokenised(line)).split()]
        return symbols

    def text_of(self, symbols: Iterable[str]) -> str:
        """The text of symbols."""
        lines: list[list[str]] = [[]]
        for symbol in symbols:
            if symbol == END_OF_LINE:
                lines.append([])
            else:
                lines[-1].append(symbol)
        return "\n".join(self.plain(undone(" ".join(line), self.level)) for line in lines)


class Words(Lines):
    """Words as white space separates them."""

    level = "word"


class Subwords(Lines):
    """Subwords of subword-nmt."""

    level = "bpe"
    segmenter: Segmenter

    def segmented(self, line: str) -> str:
        return self.segmenter.line(line)


class Characters(Lines):
    """Characters; a space is a symbol of its own, that behind the last word too."""

    level = "char"

    def segmented(self, line: str) -> str:
        return characters(line)

    def symbols_of(self, text: str) -> list[str]:
        symbols = super().symbols_of(text)
        return [*symbols, SPACE] if text.strip() and text.endswith(" ") else symbols


class Bytes(Characters):
    """Bytes of UTF-8."""

    level = "byte"

    def segmented(self, line: str) -> str:
        return byte_symbols(line)


class Moses(Lines):
    """Moses in front of a level, and undone behind it."""

    def tokenised(self, line: str) -> str:
        return tokenised(line, "moses", self.language, self.level)

    def plain(self, line: str) -> str:
        return MosesDetokenizer(lang=self.language).detokenize(line.split(), unescape=False)
