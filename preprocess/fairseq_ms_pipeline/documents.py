"""Stage 1, first half: which split and which document a line belongs to."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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
        any_name = not self.dataset.split_names
        drawn: Draw | Ends = (draw := Draw(self.dataset, self.seed))
        if any_name and self.dataset.documents == "ends":
            # Two passes, each of which is half of the work.
            whole, advance = advance, lambda count: whole(count // 2)
            drawn = Ends(self.dataset, self.seed, *self._sizes(advance))
        elif any_name and self.dataset.documents == "file":
            names = (file.name for file in text_files(self.inputs, self.wanted, any_name=True))
            # An article is a document whatever is said of files.
            draw.share_out(name for name in names if not matches(name, self.dataset.json_names))
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

    def _sizes(self, advance: Callable[[int], object]) -> tuple[array[int], array[int]]:
        """The bytes and the lines of every document, as they will be read again."""
        sizes, lines = array("q"), array("q")
        for path in self.inputs:
            for file in text_files([path], self.wanted, advance, any_name=True):
                for starts_document, text in self._marked(file):
                    if starts_document:
                        sizes.append(0)
                        lines.append(0)
                    sizes[-1] += _bytes_of(text)
                    lines[-1] += 1
        return sizes, lines

    def _lines_of(self, file: TextFile, drawn: Draw | Ends) -> Iterator[Line]:
        given = self.given_split(file.name) if self.dataset.split_names else None
        split = given or SPLITS[0]
        started = False
        for starts_document, text in self._marked(file):
            before = split
            if given is None:
                split = drawn.split_of_line(file.name, starts_document, text)
            # A document that is cut has a part in each of several splits.
            started = started or starts_document or split != before
            if text.strip() or self.dataset.blank_lines == "keep":
                yield Line(split, started, text)
                started = False

    def _marked(self, file: TextFile) -> Iterator[tuple[bool, str]]:
        if matches(file.name, self.dataset.json_names):
            for article in articles(file, self.dataset.json_fields):
                yield from ((index == 0, line) for index, line in enumerate(article))
            return
        yield from document_starts(text_lines(file), self.dataset.documents)


def _bytes_of(line: str) -> int:
    return len(line.encode()) + 1


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


def _uniform(seed: int, key: str) -> float:
    """A number from 0 to 1, always the same."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _fractions(dataset: Dataset) -> dict[str, float]:
    return {"valid": dataset.valid_fraction, "test": dataset.test_fraction}


class Ends:
    """Gives valid and test their fractions of all bytes: the ends of long documents, and of the others whole ones.

    Long is what has over a tenth of all bytes, or over twice the smaller fraction, and lines enough to be cut: at a
    paragraph, which is a line where no lines are empty.

    Args:
        sizes: the bytes of each document, its lines with their ends
        lines: how many lines it has
    """

    def __init__(self, dataset: Dataset, seed: int, sizes: Sequence[int], lines: Sequence[int]) -> None:
        self.fractions, self.sizes = _fractions(dataset), sizes
        least = min(self.fractions.values())
        long = min(0.1, 2 * least) * sum(sizes)
        short = [number for number, size in enumerate(sizes) if size <= long or lines[number] * least < 1]
        left = {split: fraction * sum(sizes[number] for number in short) for split, fraction in self.fractions.items()}
        self.whole = dict.fromkeys(short, "train")
        for number in sorted(short, key=lambda number: _uniform(seed, f"document {number}")):
            # Where that brings the split nearer to what it is to have.
            if split := next((split for split in left if sizes[number] / 2 <= left[split]), None):
                self.whole[number] = split
                left[split] -= sizes[number]
        if len(short) == len(sizes) >= len(SPLITS):
            # None of a few large ones comes near it.
            for split in left.keys() - self.whole.values():
                train = [number for number in short if self.whole[number] == "train"]
                self.whole[min(train, key=sizes.__getitem__)] = split
        self.number = -1

    def split_of_line(self, file_name: str, starts_document: bool, text: str) -> str:
        """The split of the next line."""
        if starts_document:
            self.number += 1
            self.at, self.after_blank, self.has_blank, self.cut = 0, False, False, iter(self._cuts())
            self.split, self.next, self.latest = next(self.cut)
        if self.at >= self.next and (self.after_blank or not self.has_blank or self.at >= self.latest):
            self.split, self.next, self.latest = next(self.cut)
        self.at += _bytes_of(text)
        self.after_blank = not text.strip()
        self.has_blank |= self.after_blank
        return self.split

    def _cuts(self) -> Iterator[tuple[str, float, float]]:
        """The parts of a document in turn, each with the bytes before its end, where no paragraph ends and at most."""
        size = self.sizes[self.number]
        if self.number in self.whole:
            yield self.whole[self.number], math.inf, math.inf
            return
        valid, test = (fraction * size for fraction in self.fractions.values())
        yield "train", size - valid - test, size - valid - test + valid / 10
        yield "valid", size - test, size - test + test / 10
        yield "test", math.inf, math.inf


class Draw:
    """Draws a split for each document; the same seed and order give the same splits."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.fractions = _fractions(dataset)
        self.seed = seed
        self.documents = 0
        self.shared: dict[str, str] = {}
        self.begun: Counter[str] = Counter()

    @staticmethod
    def _key(name: str, seen: Counter[str]) -> str:
        """A file's name; of several inputs' files of one name, the later ones' with a number."""
        seen[name] += 1
        return name if seen[name] == 1 else f"{name}\0{seen[name]}"

    def share_out(self, names: Iterable[str]) -> None:
        """Give whole files exact shares of the splits, at least one file each, so that few files do for all three."""
        seen: Counter[str] = Counter()
        order = sorted((self._key(name, seen) for name in names), key=partial(_uniform, self.seed))
        total = len(order)
        for split, fraction in self.fractions.items():
            count = max(1, round(fraction * total))
            self.shared.update(dict.fromkeys(order[:count], split))
            order = order[count:]
        self.shared.update(dict.fromkeys(order, "train"))

    def split_of_line(self, file_name: str, starts_document: bool, text: str) -> str:
        """The split of the next line."""
        if starts_document:
            self.split = self.split_of(file_name)
        return self.split

    def split_of(self, file_name: str) -> str:
        """The split of the document that begins here."""
        self.documents += 1
        if (key := self._key(file_name, self.begun)) in self.shared:
            return self.shared[key]
        draw = _uniform(self.seed, f"document {self.documents}")
        for split, fraction in self.fractions.items():
            if draw < fraction:
                return split
            draw -= fraction
        return "train"
