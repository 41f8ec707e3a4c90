"""Plain sentences out of documentation: no markup, code, signatures or tables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fairseq_ms_pipeline.stdlib_docs import paragraphs

# ``code``, `name' and *argument* become the words that they mark; a**b has no marks.
MARKED = re.compile(r"(?<![\w`*])[`*]+(\w[^`*']*)[`*']+(?![\w`*])")
BETWEEN = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
# A word, an acronym or a number; names such as __init__ and maxUnits, formulas and addresses are none of them.
WORD = re.compile(r"[A-Za-z]?[a-z]*(?:['-][a-z]+)*|[A-Z]{2,5}|\d+")
FEWEST, MOST = 4, 40


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring or help topic that are nothing but prose."""
    for paragraph in paragraphs(text):
        for sentence in BETWEEN.split(" ".join(MARKED.sub(r"\1", paragraph).split())):
            if is_prose(sentence):
                yield sentence


def is_prose(text: str) -> bool:
    """Whether a text is one sentence of ordinary words."""
    words = text[:-1].split()
    return (
        text[:1].isupper()
        and text[-1:] in (".", "!", "?")
        and FEWEST <= len(words) <= MOST
        and len(words[-1]) > 1  # an initial ends no sentence
        and all(WORD.fullmatch(word.rstrip(",;:")) for word in words)
    )
