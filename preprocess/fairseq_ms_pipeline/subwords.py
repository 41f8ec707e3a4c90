"""Words as subwords, by operations that BPE has learnt."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from fairseq_ms_pipeline.lines import Lines
from fairseq_ms_pipeline.text import UNKNOWN

# A worker keeps the pieces of the words it has met; Zipf's law makes even a small store answer nearly always.
CACHED_WORDS = 300_000


class Segmenter:
    """Splits words into subwords by learnt operations, with the pieces of known words at hand."""

    def __init__(self, codes: Path) -> None:
        from subword_nmt.apply_bpe import BPE

        with open(codes, encoding="utf-8", newline="\n") as file:
            self._bpe = BPE(file)
        self._pieces = {UNKNOWN: UNKNOWN}

    def line(self, line: str) -> str:
        """The subwords of a tokenised line, `@@` after all but a word's last."""
        pieces = self._pieces
        out = []
        for word in line.split():
            known = pieces.get(word)
            if known is None:
                known = " ".join(self._bpe.segment_tokens([word]))
                if len(pieces) >= CACHED_WORDS:
                    pieces.clear()
                    self._bpe.cache.clear()
                    pieces[UNKNOWN] = UNKNOWN
                pieces[word] = known
            out.append(known)
        return " ".join(out)


class Subwords(Lines):
    """Lines of subwords, by the operations in ``codes_file``."""

    @cached_property
    def segmenter(self) -> Segmenter:
        """What splits the words; it reads the operations once."""
        return Segmenter(Path(str(self.codes_file)))

    def segmented(self, line: str) -> str:
        return self.segmenter.line(line)
