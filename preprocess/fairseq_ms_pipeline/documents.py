"""Stage 1, first half: which split and which document a line belongs to."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tqdm import tqdm

from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.sources import TAR_ENDS, TextFile, articles, matches, plain_name, text_files, text_lines

# Archives, whose members have names of their own, and what the `map` of Hugging Face's datasets keeps.
_NO_TEXT = (".zip", ".arrow", *TAR_ENDS)
HEADING = re.compile(r" ?= [^=].* =\s*")


class Line(NamedTuple):
    """One line of a split; `starts_document` is true for a document's first."""

    split: str
    starts_document: bool
    text: str


class Reader:
    """The lines of a data set's inputs in order, each with its split."""

    def __init__(self, dataset: Dataset, inputs: list[Path], seed: int) -> None:
        self.dataset = dataset
        self.inputs = inputs
        self.seed = seed
        self.passed_over: set[str] = set()

    def wanted(self, name: str) -> bool:
        """Whether a file inside the inputs belongs to the data set; what does not is remembered."""
        if self.dataset.split_names:
            found = self.given_split(name) is not None
        else:
            found = matches(name, self.dataset.text_names) or matches(name, self.dataset.json_names)
        if not found and matches(name, ("*",)) and not name.endswith(_NO_TEXT):
            self.passed_over.add(name)
        return found

    def others(self) -> str:
        """What was passed over, by its ending: `12 .py, 3 .md`; empty if nothing was."""
        endings = Counter(PurePosixPath(plain_name(name)).suffix or "without an ending" for name in self.passed_over)
        return ", ".join(f"{count} {ending}" for ending, count in endings.most_common())

    def given_split(self, name: str) -> str | None:
        """The split a file belongs to by its name, for data sets whose split is given.

        A pattern such as `train/*.txt` also takes files in folders below train/; the innermost such folder decides.
        """
        *folders, file = PurePosixPath(name).parts
        for count in range(len(folders), -1, -1):
            outer = "/".join([*folders[:count], file])
            for split, patterns in self.dataset.split_names.items():
                if matches(outer, patterns if count == len(folders) else _of_folders(patterns)):
                    return split
        return None

    def lines(self, advance: Callable[[int], object] = lambda count: None) -> Iterator[Line]:
        """All lines; ValueError when an input, or one of its text files, holds no text of the data set."""
        drawn = Draw(self.dataset, self.seed)
        any_name = not self.dataset.split_names
        if any_name and self.dataset.documents == "file":
            names = (file.name for file in text_files(self.inputs, self.wanted, any_name=True))
            # An article is a document whatever is said of files.
            drawn.share_out(name for name in names if not matches(name, self.dataset.json_names))
        for path in self.inputs:
            found = has_text = False
            for file in text_files([path], self.wanted, advance, any_name):
                found, file_has_text = True, False
                for line in self._lines_of(file, drawn):
                    file_has_text = file_has_text or bool(line.text.strip())
                    yield line
                # A file of articles may hold one, which may be empty.
                if not file_has_text and not matches(file.name, self.dataset.json_names):
                    raise ValueError(f"--input {file.name} has no text.")
                has_text = has_text or file_has_text
            if not found:
                held = f"it has {self.others()}" if self.passed_over else "it has none at all"
                wanted = f"{self.dataset.title} ({', '.join(self._sought())})"
                raise ValueError(f"--input {path} holds no file of {wanted}: {held}{self._advice()}.")
            if not has_text:
                raise ValueError(f"--input {path} has no text.")
        if self.passed_over:
            tqdm.write(f"Not read: {self.others()}{self._advice()}.", sys.stderr)

    def _advice(self) -> str:
        """How files of other names are read."""
        if self.dataset.split_names:
            return "; their names say no split" if self.passed_over else ""
        return "; --suffix .ENDING reads others" if self.dataset.name == "text" else ""

    def _sought(self) -> tuple[str, ...]:
        """Patterns of the names of files that are read."""
        if self.dataset.split_names:
            return tuple(name for names in self.dataset.split_names.values() for name in names)
        return self.dataset.text_names + self.dataset.json_names

    def _lines_of(self, file: TextFile, drawn: Draw) -> Iterator[Line]:
        given = self.given_split(file.name) if self.dataset.split_names else None
        split = given or SPLITS[0]
        started = False
        for starts_document, text in self._marked(file):
            if starts_document and given is None:
                split = drawn.split_of(file.name)
            started = started or starts_document
            if text.strip() or self.dataset.blank_lines == "keep":
                yield Line(split, started, text)
                started = False

    def _marked(self, file: TextFile) -> Iterator[tuple[bool, str]]:
        if matches(file.name, self.dataset.json_names):
            for article in articles(file, self.dataset.json_fields):
                yield from ((index == 0, line) for index, line in enumerate(article))
            return
        yield from document_starts(text_lines(file), self.dataset.documents)


def _of_folders(patterns: Iterable[str]) -> tuple[str, ...]:
    """Those that take every file of a folder."""
    return tuple(pattern for pattern in patterns if "/*." in pattern)


def document_starts(lines: Iterable[str], documents: str) -> Iterator[tuple[bool, str]]:
    """Each line with whether it starts a document; a file's first line always does."""
    run = int(documents.partition(":")[2] or 1)
    after_blank, has_text = True, False
    for index, line in enumerate(lines):
        if documents == "wikitext":
            # The empty line before a heading stays with the article before it: order is all that matters.
            starts = has_text and after_blank and HEADING.fullmatch(line) is not None
        elif documents == "blank":
            starts = has_text and after_blank and bool(line.strip())
        else:
            starts = documents.startswith("line") and index % run == 0
        after_blank = not line.strip()
        has_text = has_text or not after_blank
        yield index == 0 or starts, line


class Draw:
    """Draws a split for each document; the same seed and order give the same splits."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.fractions = {"valid": dataset.valid_fraction, "test": dataset.test_fraction}
        self.seed = seed
        self.documents = 0
        self.shared: dict[str, str] = {}
        self.begun: Counter[str] = Counter()

    def _uniform(self, key: str) -> float:
        digest = hashlib.blake2b(f"{self.seed}:{key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    @staticmethod
    def _key(name: str, seen: Counter[str]) -> str:
        """A file's name; of several inputs' files of one name, the later ones' with a number."""
        seen[name] += 1
        return name if seen[name] == 1 else f"{name}\0{seen[name]}"

    def share_out(self, names: Iterable[str]) -> None:
        """Give whole files exact shares of the splits, at least one file each, so that few files do for all three."""
        seen: Counter[str] = Counter()
        order = sorted((self._key(name, seen) for name in names), key=self._uniform)
        total = len(order)
        for split, fraction in self.fractions.items():
            count = max(1, round(fraction * total))
            self.shared.update(dict.fromkeys(order[:count], split))
            order = order[count:]
        self.shared.update(dict.fromkeys(order, "train"))

    def split_of(self, file_name: str) -> str:
        """The split of the document that begins here."""
        self.documents += 1
        if (key := self._key(file_name, self.begun)) in self.shared:
            return self.shared[key]
        draw = self._uniform(f"document {self.documents}")
        for split, fraction in self.fractions.items():
            if draw < fraction:
                return split
            draw -= fraction
        return "train"
