"""Tokenised text as it was before tokenisation, for a judge that was trained on such text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from fairseq_ms.analysis import report

if TYPE_CHECKING:
    from sacremoses import MosesDetokenizer

# WikiText's marks for signs inside of numbers and words; Moses' own is for hyphens alone.
_INSIDE = re.compile(r" @([-,.])@ ")
_END = "</s>"


@lru_cache(maxsize=1)
def _detokeniser() -> MosesDetokenizer:
    report.require_package("sacremoses", "--hf-lm", "sacremoses")
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang="en")


def text_of(words: Sequence[str]) -> str:
    """Words and ends of lines as natural text, a line break for each end."""
    parts = []
    for is_end, group in groupby(words, key=lambda word: word == _END):
        found = list(group)
        if is_end:
            parts.append("\n" * len(found))
        else:
            parts.append(_detokeniser().detokenize(_INSIDE.sub(r"\1", " ".join(found)).split()))
    return "".join(parts)


def continuation(context: Sequence[str], sample: Sequence[str]) -> tuple[str, str]:
    """The texts of a context and of what follows it, which begins with the space or sign that joins the two."""
    before, whole = text_of(context), text_of([*context, *sample])
    if whole.startswith(before):
        return before, whole[len(before) :]
    # A quotation mark, say, that only the sample closes: joined by a space then.
    return before, f" {text_of(sample)}"
