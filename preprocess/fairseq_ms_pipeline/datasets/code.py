"""Prepare source code as byte-level subwords: any folders, by default the library of the Python that runs this.

The files of a folder follow one another, since they share names, and lie in one split; where folders are too few for
three splits, files are split. Of equal files the first counts.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fairseq_ms_pipeline.cli import add_bpe_flags, common_parser, job_of, run_job, seed_of, with_flags
from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.documents import Line
from fairseq_ms_pipeline.run import Job
from fairseq_ms_pipeline.sources import check_inputs, identity_of, matches, plain_files
from fairseq_ms_pipeline.stdlib_docs import library_folder, split_by_size

# Those of the recorded experiments: with fewer names other folders of Python's library are held out.
ENDINGS = "py c h cc cpp hpp cu java js ts go rs rb php cs swift kt scala lua jl ml hs sh sql"
NAMES = tuple(f"*.{ending}" for ending in ENDINGS.split())
DATASET = Dataset(
    name="code",
    title="Source code",
    level="hf_byte_bpe",
    bpe_merges=4096 - 256 - 4,
    text_names=NAMES,
)
# Of a Python's library: what was installed into it, and what is no source.
PASSED_OVER = frozenset(["site-packages", "dist-packages", "__pycache__"])


class Source(NamedTuple):
    """A file: its folder from the input's name on, its size in bytes, a digest of them, and whether they are text."""

    folder: str
    path: Path
    size: int
    digest: str
    has_text: bool


def sources_of(path: Path, names: tuple[str, ...]) -> list[Source]:
    """The files of these names in an input, sorted; ValueError when it has none."""
    found = []
    for file in plain_files(path):
        if not matches(file.name, names) or PASSED_OVER.intersection(file.relative_to(path.parent).parts[1:]):
            continue
        content = file.read_bytes()
        try:
            has_text = bool(content.decode("utf-8-sig").strip())
        except UnicodeDecodeError:
            has_text = False
        folder = file.parent.relative_to(path.parent).as_posix()
        found.append(Source(folder, file, len(content), hashlib.blake2b(content).hexdigest(), has_text))
    if not found:
        raise ValueError(f"--input {path} holds no file of {' '.join(names)}.")
    return found


def placed_files(sources: list[Source], seed: int, fraction: float) -> list[tuple[str, str, Source]]:
    """The document, the split and the file, of files that are UTF-8 with text; of equal ones the first.

    A document is a folder, or a file where folders would leave a split empty; ValueError where files would, too.
    """
    folders: Counter[str] = Counter()
    different: dict[str, Source] = {}
    for source in sorted(sources, key=lambda source: source.folder):
        folders[source.folder] += source.size
        if source.has_text:
            different.setdefault(source.digest, source)
    found = list(different.values())
    documents = [source.folder for source in found]
    splits = split_by_size(folders, seed, fraction)
    if {splits[document] for document in documents} != set(SPLITS):
        documents = [f"{source.folder} {number}" for number, source in enumerate(found)]
        sizes = dict(zip(documents, (source.size for source in found), strict=True))
        splits = split_by_size(sizes, seed, fraction, few=True)
    if len(found) < len(SPLITS):
        least = f"{len(SPLITS)} different files with text, one each for {', '.join(SPLITS)}"
        raise ValueError(f"--input must have at least {least}: it has {len(found)}.")
    return [(document, splits[document], source) for document, source in zip(documents, found, strict=True)]


def code(placed: list[tuple[str, str, Source]], advance: Callable[[int], object]) -> Iterator[Line]:
    """The lines of the files, each with the split of its document."""
    before = None
    for document, split, source in placed:
        advance(source.size)
        for line in source.path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n"):
            yield Line(split, document != before, line.removesuffix("\r"))
            before = document


def make_job(args: argparse.Namespace) -> Job:
    """The run of this data set as the flags ask for it."""
    dataset = with_flags(DATASET, args)
    dataset = replace(dataset, text_names=tuple(args.names or dataset.text_names))
    inputs = list(args.input) or [library_folder()]
    check_inputs(inputs)
    found = [sources_of(path, dataset.text_names) for path in inputs]
    placed = placed_files(list(chain.from_iterable(found)), seed_of(args), dataset.valid_fraction)
    total = sum(source.size for _, _, source in placed)
    identities = [
        identity_of(path, ((f"{source.folder}/{source.path.name}", source.digest) for source in sources))
        for path, sources in zip(inputs, found, strict=True)
    ]
    return job_of(args, dataset, partial(code, placed), total, inputs=identities)


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    parser = common_parser(__doc__)
    inputs = "folders of source code (default: the library of this Python, without installed packages)"
    parser.add_argument("--input", type=Path, nargs="+", default=[], help=inputs)
    parser.add_argument("--names", nargs="+", metavar="PATTERN", help=f"of files (default: {' '.join(NAMES)})")
    add_bpe_flags(parser, DATASET)
    return run_job(make_job, parser.parse_args())
