"""Prepare source code as byte-level subwords: any folders, by default the library of the Python that runs this.

The files of a folder follow one another, since they share names, and lie in one split; of equal files the first counts.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fairseq_ms_pipeline.cli import add_bpe_flags, common_parser, job_of, run_job, seed_of, with_flags
from fairseq_ms_pipeline.dataset import Dataset
from fairseq_ms_pipeline.documents import Line
from fairseq_ms_pipeline.run import Job
from fairseq_ms_pipeline.sources import check_inputs, matches, plain_files
from fairseq_ms_pipeline.stdlib_docs import library_folder, split_by_size

NAMES = tuple(f"*.{ending}" for ending in ("py", "c", "h", "cc", "cpp", "hpp", "cu", "java", "js", "ts", "go", "rs"))
DATASET = Dataset(
    name="code",
    title="Source code",
    level="hf_byte_bpe",
    bpe_merges=4096 - 256 - 4,
    text_names=NAMES,
)
# Of a Python's library: what was installed into it, and what is no source.
PASSED_OVER = frozenset(["site-packages", "dist-packages", "__pycache__"])


def source_files(inputs: list[Path], names: tuple[str, ...]) -> dict[str, list[Path]]:
    """The files of these names by their folder, both sorted; ValueError for an input that has none."""
    check_inputs(inputs)
    folders: dict[str, list[Path]] = {}
    for path in inputs:
        found = [file for file in plain_files(path) if matches(file.name, names)]
        found = [file for file in found if not PASSED_OVER.intersection(file.relative_to(path.parent).parts[1:])]
        if not found:
            raise ValueError(f"--input {path} holds no file of {' '.join(names)}.")
        for file in found:
            folders.setdefault(file.parent.relative_to(path.parent).as_posix(), []).append(file)
    return dict(sorted(folders.items()))


def code(
    folders: dict[str, list[Path]], seed: int, fraction: float, advance: Callable[[int], object]
) -> Iterator[Line]:
    """The lines of the files that are UTF-8, a document a folder, each with the split of its folder."""
    sizes = {name: sum(file.stat().st_size for file in files) for name, files in folders.items()}
    splits = split_by_size(sizes, seed, fraction)
    seen: set[bytes] = set()
    for name, files in folders.items():
        starts = True
        for file in files:
            content = file.read_bytes()
            advance(len(content))
            digest = hashlib.blake2b(content).digest()
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError:
                continue
            if digest in seen or not text.strip():
                continue
            seen.add(digest)
            for line in text.removesuffix("\n").split("\n"):
                yield Line(splits[name], starts, line.removesuffix("\r"))
                starts = False


def make_job(args: argparse.Namespace) -> Job:
    """The run of this data set as the flags ask for it."""
    dataset = with_flags(DATASET, args)
    inputs = list(args.input) or [library_folder()]
    folders = source_files(inputs, tuple(args.names) if args.names else dataset.text_names)
    lines = partial(code, folders, seed_of(args), dataset.valid_fraction)
    total = sum(file.stat().st_size for files in folders.values() for file in files)
    return job_of(args, dataset, lines, total, inputs=[path.name for path in inputs])


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    parser = common_parser(__doc__)
    inputs = "folders of source code (default: the library of this Python, without installed packages)"
    parser.add_argument("--input", type=Path, nargs="+", default=[], help=inputs)
    parser.add_argument("--names", nargs="+", metavar="PATTERN", help=f"of files (default: {' '.join(NAMES)})")
    add_bpe_flags(parser, DATASET)
    return run_job(make_job, parser.parse_args())
