"""Exercises in recall: a passage, filler, and the question for the passage, one exercise a line."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fairseq_ms_pipeline.dataset import SPLITS, check_all
from fairseq_ms_pipeline.documents import Line
from fairseq_ms_pipeline.files import Json
from fairseq_ms_pipeline.stdlib_docs import corpus, library_folder, split_by_module

SET, ASK = "[set]", "[ask]"
TASKS = ("passkey", "pairs", "copy")
FILLERS = ("constant", "counting", "docs")
ASKING = ("suddenly", "announced")
# Filler that counts goes through so many symbols and begins again.
COUNTED = 16


@dataclass(frozen=True)
class Recall:
    """What the exercises are.

    task: `passkey` asks for the only value of its line; `pairs` has a key before each value and asks for the value of
    one of them; `copy` asks for a whole passage.
    filler: `constant` repeats one symbol, `counting` runs through sixteen in a fixed order, `docs` is the documentation
    of Python's standard library.
    ask: `announced` puts a symbol before the answer; `suddenly` does not, so that a model has to be ready for the
    question at every symbol of filler. With pairs, the key announces it.
    longest: the greatest distance in tokens, from a symbol to the place where it is asked for.
    values: how many different symbols can be asked for. pairs: pairs of a line. passage: symbols of a passage.
    tokens: about as many in the training split; valid_tokens and test_tokens in the others.
    """

    task: str = "passkey"
    filler: str = "constant"
    ask: str = "suddenly"
    longest: int = 64
    values: int = 16
    pairs: int = 4
    passage: int = 8
    tokens: int = 600_000
    valid_tokens: int = 4_000
    test_tokens: int = 60_000

    def check(self) -> None:
        """Raise ValueError, in one sentence, for a flag that cannot work."""
        check_all(
            (self.values >= 2, "--values must be at least 2", self.values),
            (self.pairs >= 1, "--pairs must be at least 1", self.pairs),
            (self.passage >= 1, "--passage must be at least 1", self.passage),
        )
        if self.task == "pairs" and self.pairs > self.values:
            raise ValueError(f"--pairs must not exceed --values {self.values}, so that keys differ: got {self.pairs}.")
        if self.longest < self.shortest:
            raise ValueError(
                f"--longest must be at least {self.shortest}, the distance without filler: got {self.longest}."
            )
        least, rule = 10 * self.longest, f"must be at least ten times --longest {self.longest}"
        check_all(
            (self.tokens >= least, f"--tokens {rule}", self.tokens),
            (self.test_tokens >= least, f"--test-tokens {rule}", self.test_tokens),
        )

    @property
    def length(self) -> int:
        """Symbols of a passage."""
        return self.passage if self.task == "copy" else 1

    @property
    def named(self) -> bool:
        """Whether a key stands before each passage."""
        return self.task == "pairs"

    @property
    def shortest(self) -> int:
        """The distance without filler: from a passage's symbol to the place where the same one is asked for."""
        return max(1, self.without_filler(self.pairs - 1 if self.named else 0))

    def without_filler(self, passages_between: int) -> int:
        """The same, so many passages being written after the one that is asked for; 0 where it is the next symbol."""
        between = (1 + self.named + self.length) * passages_between
        return between + self.length - 1 + self.named + self.announced

    @property
    def announced(self) -> bool:
        """Whether a symbol stands before a question."""
        return self.named or self.ask == "announced"

    def symbols(self) -> list[str]:
        """The symbols that passages consist of."""
        # No word of running text is written so.
        return [f"v-{number}" for number in range(self.values)]

    def description(self) -> Json:
        """What an analysis has to know to find the answers among the symbols."""
        signs = {"set": SET, "ask": ASK if self.announced else None, "choices": self.symbols()}
        return {**signs, "key_length": int(self.named), "passage_length": self.length}


class Exercises:
    """The exercises as lines of the pipeline, drawn by a seed; training distances are mostly short, others even."""

    def __init__(self, recall: Recall, seed: int) -> None:
        self.recall, self.seed = recall, seed

    def lines(self, advance: Callable[[int], object]) -> Iterator[Line]:
        """All exercises of all splits."""
        counts = (self.recall.tokens, self.recall.valid_tokens, self.recall.test_tokens)
        fillers = _fillers(self.recall.filler, self.seed)
        for split, tokens in zip(SPLITS, counts, strict=True):
            draw = random.Random(f"{self.seed} {split}")
            written = 0
            while written < tokens:
                words = self._exercise(draw, fillers[split], even=split != "train")
                written += len(words) + 1
                text = " ".join(words)
                advance(len(text) + 1)
                yield Line(split, True, text)

    def _exercise(self, draw: random.Random, filler: Iterator[str], even: bool) -> list[str]:
        recall, symbols = self.recall, self.recall.symbols()
        count = recall.pairs if recall.named else 1
        keys = [[f"k-{number}"] if recall.named else [] for number in draw.sample(range(recall.values), count)]
        passages = [[draw.choice(symbols) for _ in range(recall.length)] for _ in keys]
        asked = draw.randrange(count)
        least = recall.without_filler(count - 1 - asked)
        gap = _distance(draw, max(1, least), recall.longest, even) - least
        words = [word for key, passage in zip(keys, passages) for word in (SET, *key, *passage)]
        ask = [ASK] if recall.announced else []
        return [*words, *itertools.islice(filler, gap), *ask, *keys[asked], *passages[asked]]


def _distance(draw: random.Random, least: int, longest: int, even: bool) -> int:
    """A distance from ``least`` to ``longest``: all equally likely, or equally likely by order of magnitude."""
    if even:
        return draw.randint(least, longest)
    return least - 1 + int(math.exp(draw.uniform(0.0, math.log(longest - least + 2))))


def _fillers(kind: str, seed: int) -> dict[str, Iterator[str]]:
    """Endless filler for each split; that of ``docs`` is other modules' text in each."""
    if kind == "constant":
        return {split: itertools.repeat(".") for split in SPLITS}
    if kind == "counting":
        return {split: itertools.cycle(f"n-{number}" for number in range(COUNTED)) for split in SPLITS}
    texts = corpus(library_folder())
    splits = split_by_module(texts, seed, fraction=0.05)
    words: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name, lines in texts.items():
        words[splits[name]] += [word for line in lines for word in re.findall(r"\w+|[^\w\s]", line.lower())]
    return {split: itertools.cycle(words[split]) for split in SPLITS}
