"""Text as a model's symbols and back, line by line, as its data was prepared.

Every line of a text but the last ends in the dictionary's symbol for that, as in the data; text after the last line
end, if any, is a line without an end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from fairseq_ms_pipeline.text import SPACE, byte_symbols, characters, spelled, undone

END_OF_LINE = "</s>"


class Lines:
    """A line is tokenised, here by white space, then segmented: into its words, characters or bytes.

    Attributes:
        level: ``word``, ``bpe``, ``char`` or ``byte``
        language: of Moses
        codes_file: the operations of BPE
        of_bytes: symbols of single bytes, of which those side by side are undone together
    """

    level = "word"
    language = "en"
    codes_file: str | Path | None = None
    of_bytes: Collection[str] = ()

    def tokenised(self, line: str) -> str:
        """Words, separated by single spaces."""
        return spelled(line, self.level)

    def segmented(self, line: str) -> str:
        """A tokenised line's symbols, separated by single spaces."""
        return {"char": characters, "byte": byte_symbols}.get(self.level, str)(line)

    def plain(self, line: str) -> str:
        """The text of a tokenised line."""
        return line

    def symbols_of(self, text: str) -> list[str]:
        """The symbols of a text."""
        first, *lines = text.split("\n")
        symbols = self.segmented(self.tokenised(first)).split()
        for line in lines:
            symbols += [END_OF_LINE, *self.segmented(self.tokenised(line)).split()]
        # Where a space is a symbol, that after the last word counts too.
        ends_in_space = self.level in ("char", "byte") and text.strip() and text.endswith(" ")
        return [*symbols, SPACE] if ends_in_space else symbols

    def text_of(self, symbols: Iterable[str]) -> str:
        """The text of symbols."""
        lines: list[list[str]] = [[]]
        for symbol in symbols:
            if symbol == END_OF_LINE:
                lines.append([])
            else:
                lines[-1].append(symbol)
        return "\n".join(self.plain(undone(" ".join(line), self.level)) for line in lines)
