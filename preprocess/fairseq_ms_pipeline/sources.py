"""The lines of a data set's text files, wherever they lie: in a folder, a zip, a tar, compressed or plain."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, cast

from fairseq_ms_pipeline.text import decoded

OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
TAR_ENDS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)


@dataclass(frozen=True)
class TextFile:
    """One file found: its name inside the input, and its bytes as a readable stream."""

    name: str
    stream: IO[bytes]


def plain_name(name: str) -> str:
    """The name without a compression's ending, as name patterns are matched against it."""
    return name[: name.rfind(".")] if name.endswith(tuple(OPENERS)) else name


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a file's last name parts match one of the patterns; `a/*.txt` asks for the folder too."""
    parts = PurePosixPath(plain_name(name)).parts
    # Hidden files, and what macOS adds to archives ("._train.txt"), are never part of a data set.
    return not parts[-1].startswith(".") and any(
        len(parts) >= len(wanted) and all(map(fnmatch, parts[-len(wanted) :], wanted))
        for wanted in (PurePosixPath(pattern).parts for pattern in patterns)
    )


def check_inputs(inputs: list[Path]) -> None:
    """Raise ValueError for a path that does not exist or is empty."""
    if not inputs:
        raise ValueError("--input is missing: name the file, archive or folder that holds the data set.")
    for path in inputs:
        if not path.exists():
            raise ValueError(f"--input {path} does not exist.")
        if path.is_dir() and not any(path.iterdir()):
            raise ValueError(f"--input {path} is an empty folder.")


def total_bytes(inputs: list[Path]) -> int:
    """Bytes on disk of all inputs (of compressed ones: compressed)."""
    return sum(file.stat().st_size for path in inputs for file in _plain_files(path))


def text_files(
    inputs: list[Path],
    wanted: Callable[[str], bool],
    advance: Callable[[int], object] = lambda count: None,
    any_name: bool = False,
) -> Iterator[TextFile]:
    """Every wanted file of the inputs, in an order that depends on names alone (for tar: the order inside).

    With `any_name`, a file named as an input itself is taken whatever it is called. `advance` is told of bytes
    read on disk. Each stream must be read before the next file is asked for. ValueError names an archive that is
    damaged.
    """
    for path in inputs:
        for file in _plain_files(path):
            name = file.relative_to(path.parent).as_posix()
            with _damage_named(str(file)):
                # Asked first, since a wanted file may be a zip itself, as NumPy's npz are.
                if wanted(name):
                    yield from _plain_file(file, name, advance)
                elif zipfile.is_zipfile(file):
                    yield from _zip_members(file, wanted)
                    advance(file.stat().st_size)
                elif file.name.endswith(TAR_ENDS):
                    with _Counted(file, advance) as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
                        yield from _tar_members(tar, wanted)
                elif any_name and path.is_file():
                    yield from _plain_file(file, name, advance)


def _plain_file(file: Path, name: str, advance: Callable[[int], object]) -> Iterator[TextFile]:
    with _Counted(file, advance) as raw:
        opener = OPENERS.get(file.suffix)
        yield TextFile(name, opener(raw) if opener else raw)


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Turn what a damaged archive or compressed file raises into one sentence with its name."""
    try:
        yield
    except (*DAMAGE, OSError) as error:
        raise ValueError(f"--input {name} is damaged or incomplete ({error}).") from None


def contents(file: TextFile) -> bytes:
    """All bytes of a file; ValueError names one that is damaged."""
    with _damage_named(file.name):
        return file.stream.read()


def _raw_lines(file: TextFile) -> Iterator[bytes]:
    with _damage_named(file.name):
        yield from file.stream


def _plain_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _zip_members(file: Path, wanted: Callable[[str], bool]) -> Iterator[TextFile]:
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith("/") and wanted(name):
                with archive.open(name) as member:
                    opener = OPENERS.get(PurePosixPath(name).suffix)
                    yield TextFile(name, opener(member) if opener else member)


def _tar_members(tar: tarfile.TarFile, wanted: Callable[[str], bool]) -> Iterator[TextFile]:
    for member in tar:
        if member.isfile() and wanted(member.name):
            stream = tar.extractfile(member)
            assert stream is not None, "a regular file always has a stream"
            opener = OPENERS.get(PurePosixPath(member.name).suffix)
            yield TextFile(member.name, opener(stream) if opener else stream)


class _Counted(io.BufferedReader):
    """A file that reports the bytes read from it."""

    def __init__(self, path: Path, advance: Callable[[int], object]) -> None:
        super().__init__(io.FileIO(path), buffer_size=1 << 18)
        self._advance = advance

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._advance(len(data))
        return data

    def readline(self, size: int | None = -1) -> bytes:
        data = super().readline(size)
        self._advance(len(data))
        return data

    def __next__(self) -> bytes:
        data = super().__next__()
        self._advance(len(data))
        return data


def text_lines(file: TextFile) -> Iterator[str]:
    """The decoded lines of a plain text file."""
    return decoded(_raw_lines(file), file.name)


def json_documents(file: TextFile, fields: tuple[str, ...]) -> Iterator[list[str]]:
    """The articles of a JSON or JSON-lines file, alone or in lists, each as the lines of its `fields`.

    ValueError names the file and line of what is not JSON, and a file in which no article has one of the fields. An
    article without any of them is passed over.
    """
    if matches(file.name, ("*.json",)):
        texts: Iterator[str] = iter(["\n".join(decoded(_raw_lines(file), file.name))])
    else:
        texts = decoded(_raw_lines(file), file.name)
    found = False
    for line_number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            loaded = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file.name}, line {line_number + error.lineno - 1}: not JSON ({error.msg}).") from None
        for article in loaded if isinstance(loaded, list) else [loaded]:
            values = [article[name] for name in fields if name in article] if isinstance(article, dict) else []
            found = found or bool(values)
            lines = [line for value in values if isinstance(value, str) for line in value.splitlines()]
            if lines:
                yield lines
    if not found:
        raise ValueError(f"--input {file.name} has no article with one of the fields {', '.join(fields)}.")
