"""The lines of a data set's files of text, JSON and tables (CSV, Parquet, Arrow), wherever they lie: in a folder, a
zip, a tar, compressed or plain.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from fairseq_ms_pipeline.files import Json, digest_of, parsed
from fairseq_ms_pipeline.text import decoded

OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
TAR_ENDS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
# What `save_to_disk` of Hugging Face's datasets writes, beside JSON that is none of the data; `map` adds other streams.
TABLES = ("*.parquet", "data-*.arrow", "dataset.arrow")
DELIMITED = {"*.csv": ",", "*.tsv": "\t"}
METADATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", "manifest.json")
ROWS = 1024
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
    if parts[-1].startswith(".") or parts[-1] in METADATA:
        return False
    return any(
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
    return sum(file.stat().st_size for path in inputs for file in plain_files(path))


def identity_of(path: Path, files: Iterable[tuple[str, str]] | None = None) -> Json:
    """What decides the result of an input: its name, and where files lie in it with a digest of their content.

    ``files`` are those that are read of it, all by default.
    """
    if files is None:
        every = plain_files(path)
        files = ((file.relative_to(path.parent).as_posix(), digest_of(file, "blake2b")) for file in every)
    listing = "".join(f"{place}\0{digest}\n" for place, digest in files)
    digest = hashlib.blake2b(listing.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return {"name": path.name, "blake2b": digest}


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
        for file in plain_files(path):
            name = file.relative_to(path.parent).as_posix()
            with _damage_named(str(file)):
                # Asked first, since a wanted file may be a zip itself, as NumPy's npz are.
                if wanted(name):
                    yield from _plain_file(file, name, advance)
                elif zipfile.is_zipfile(file):
                    yield from _zip_members(file, wanted)
                    advance(file.stat().st_size)
                elif file.name.endswith(TAR_ENDS):
                    with _counted(file, advance) as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
                        yield from _tar_members(tar, wanted)
                elif any_name and path.is_file():
                    yield from _plain_file(file, name, advance)


def _plain_file(file: Path, name: str, advance: Callable[[int], object]) -> Iterator[TextFile]:
    with _counted(file, advance) as raw:
        yield _opened(name, raw)


def _opened(name: str, stream: IO[bytes]) -> TextFile:
    opener = OPENERS.get(PurePosixPath(name).suffix)
    return TextFile(name, opener(stream) if opener else stream)


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Turn what a damaged archive or compressed file raises into one sentence with its name."""
    try:
        yield
    except (*DAMAGE, OSError) as error:
        raise ValueError(damaged(name, error)) from None


def damaged(name: str, error: Exception) -> str:
    """The sentence for a file that cannot be read to its end."""
    reason = str(error).partition("\n")[0]
    return f"--input {name} is damaged or incomplete ({reason})."


def contents(file: TextFile) -> bytes:
    """All bytes of a file; ValueError names one that is damaged."""
    with _damage_named(file.name):
        return file.stream.read()


def _raw_lines(file: TextFile) -> Iterator[bytes]:
    with _damage_named(file.name):
        yield from file.stream


def plain_files(path: Path) -> list[Path]:
    """A file itself, or all files below a folder, through links too, sorted; hidden ones are passed over.

    A folder that several names lead to is read once, by its own name where it lies below ``path`` itself.
    """
    if path.is_file():
        return [path]
    found: list[Path] = []
    known: set[str] = set()
    starts = [path]
    for start in starts:
        for place, folders, names in os.walk(start):
            # Hidden folders hold copies of an editor's or what a run of `prepare` has not finished, never data.
            folders[:] = sorted(name for name in folders if name[0] != ".")
            if (real := os.path.realpath(place)) in known:
                folders.clear()
                continue
            known.add(real)
            # After all that is reached without a link.
            starts += [folder for folder in (Path(place, name) for name in folders) if folder.is_symlink()]
            found += [Path(place, name) for name in names if name[0] != "."]
    return sorted(file for file in found if file.is_file())


def _zip_members(file: Path, wanted: Callable[[str], bool]) -> Iterator[TextFile]:
    with zipfile.ZipFile(file) as archive:
        # By what is known of each, since several may have one name.
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            if info.is_dir() or not wanted(info.filename):
                continue
            try:
                member = archive.open(info)
            except RuntimeError:
                wrong = f"{info.filename} is encrypted, or compressed by a method that Python does not know"
                raise ValueError(f"--input {file} cannot be read ({wrong}).") from None
            with member:
                yield _opened(info.filename, member)


def _tar_members(tar: tarfile.TarFile, wanted: Callable[[str], bool]) -> Iterator[TextFile]:
    for member in tar:
        if member.isfile() and wanted(member.name):
            stream = tar.extractfile(member)
            assert stream is not None, "a regular file always has a stream"
            yield _opened(member.name, stream)


class _Counted(io.FileIO):
    """A file that reports the bytes read from it, by whichever way its buffer reads."""

    def __init__(self, path: Path, advance: Callable[[int], object]) -> None:
        super().__init__(path)
        self._advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._advance(count or 0)
        return count

    def readall(self) -> bytes:
        data = super().readall()
        self._advance(len(data))
        return data


def _counted(path: Path, advance: Callable[[int], object]) -> io.BufferedReader:
    return io.BufferedReader(_Counted(path, advance), 1 << 18)


def text_lines(file: TextFile) -> Iterator[str]:
    """The decoded lines of a plain text file."""
    return decoded(_raw_lines(file), file.name)


def articles(file: TextFile, fields: tuple[str, ...]) -> Iterator[list[str]]:
    """The articles of a file of JSON, JSON lines, CSV, Parquet or Arrow, each as the lines of its `fields`.

    ValueError names a file that is damaged, and the fields of one whose articles have none of those asked for. An
    article without any of them is passed over.
    """
    found = False
    others: Json = {}
    if matches(file.name, TABLES):
        rows = _rows(file, fields)
    else:
        rows = _delimited(file) if matches(file.name, tuple(DELIMITED)) else _json_articles(file)
    for article in rows:
        values = [article[name] for name in fields if name in article]
        found, others = found or bool(values), others or article
        texts = (value.removesuffix("\n") for value in values if value and isinstance(value, str))
        lines = [line for text in texts for line in text.split("\n")]
        try:
            "".join(lines).encode()
        except UnicodeEncodeError as error:
            character = ascii(error.object[error.start])
            raise ValueError(f"--input {file.name} has an article with {character}, which is no character.") from None
        if lines:
            yield lines
    if not found:
        there = f"its fields are {', '.join(others)}; --column names one" if others else "it has no articles"
        raise ValueError(f"--input {file.name} has no field {' or '.join(fields)}: {there}.")


def _delimited(file: TextFile) -> Iterator[Json]:
    """The names of the columns of a file of comma- or tab-separated values, without values, and then its rows."""
    delimiter = next(mark for pattern, mark in DELIMITED.items() if matches(file.name, (pattern,)))
    lines = (line + "\n" for line in decoded(_raw_lines(file), file.name))
    csv.field_size_limit(1 << 30)
    try:
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        yield dict.fromkeys(reader.fieldnames or ())
        # Cells beyond the columns have no name.
        yield from ({name: cell for name, cell in row.items() if name is not None} for row in reader)
    except csv.Error as error:
        raise ValueError(f"--input {file.name} is no table ({error}).") from None


def _json_articles(file: TextFile) -> Iterator[Json]:
    """The objects of a file, alone or in lists."""
    if matches(file.name, ("*.json",)):
        texts: Iterator[str] = iter(["\n".join(decoded(_raw_lines(file), file.name))])
    else:
        texts = decoded(_raw_lines(file), file.name)
    for line_number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            loaded = parsed(text)
        except ValueError as error:
            line, reason = getattr(error, "lineno", 1), getattr(error, "msg", error)
            raise ValueError(f"{file.name}, line {line_number + line - 1}: not JSON ({reason}).") from None
        every = loaded if isinstance(loaded, list) else [loaded]
        yield from (article for article in every if isinstance(article, dict))


def _rows(file: TextFile, fields: tuple[str, ...]) -> Iterator[Json]:
    """The names of a table's columns, without values, and then its rows with those asked for, a batch at a time."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise ValueError(f"--input {file.name} needs the package pyarrow: run pip install pyarrow.") from None
    try:
        with _damage_named(file.name):
            stream = file.stream if file.stream.seekable() else io.BytesIO(file.stream.read())
            if matches(file.name, ("*.parquet",)):
                table = parquet.ParquetFile(stream)
                names, batches = table.schema_arrow.names, table.iter_batches(ROWS, columns=list(fields))
            else:
                batches = ipc.open_stream(stream)
                names = batches.schema.names
            yield dict.fromkeys(names)
            wanted = [name for name in fields if name in names]
            for batch in batches if wanted else ():
                yield from batch.select(wanted).to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(damaged(file.name, error)) from None
