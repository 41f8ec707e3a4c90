"""Fetching a data set's file when the user asks for it: several sources, resumed transfers, checksums."""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from fairseq_ms_pipeline.dataset import Download
from fairseq_ms_pipeline.files import digest_of

BLOCK = 1 << 18
ATTEMPTS = 3
TIMEOUT_SECONDS = 60
BROKEN = (OSError, http.client.HTTPException)


def fetch(sources: tuple[Download, ...], folder: Path, quiet: bool = False) -> Path:
    """The data set's file in `folder`, downloaded from the first source that works unless it is there.

    A broken transfer goes on where it stopped. ValueError, in one sentence, says why each source failed.
    """
    for source in sources:
        path = folder / source.file_name
        if path.is_file():
            reason = _wrong_digest(path, source)
            if reason:
                raise ValueError(f"--download: {path} is there, but {reason}: remove it to fetch it again.")
            return path
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for source in sources:
        try:
            return _fetch_one(source, folder, quiet)
        except (ValueError, *BROKEN) as error:
            failures.append(f"{source.url}: {error}")
    with contextlib.suppress(OSError):
        # Goes only if it is empty; what a broken transfer has brought stays for the next attempt.
        folder.rmdir()
    raise ValueError(f"--download failed from every source ({'; '.join(failures)}).")


def _fetch_one(source: Download, folder: Path, quiet: bool) -> Path:
    path = folder / source.file_name
    part = folder / f"{source.file_name}.part"
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _transfer(source, part, quiet)
            break
        except urllib.error.HTTPError:
            # The server has answered, and will answer the same next time.
            raise
        except BROKEN:
            if attempt == ATTEMPTS:
                raise
    reason = _wrong_digest(part, source)
    if reason:
        part.unlink()
        raise ValueError(reason)
    os.replace(part, path)
    return path


def _transfer(source: Download, part: Path, quiet: bool) -> None:
    """Bring `part` to its full length, from where it stands; the checksum decides whether it is the file."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(source.url, headers={"User-Agent": "fairseq_ms"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return  # nothing is left to send
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        bar = tqdm(
            total=total, initial=start, desc=source.file_name, unit="B", unit_scale=True, file=sys.stderr, disable=quiet
        )
        with open(part, "ab" if start else "wb") as file, bar:
            while block := response.read(BLOCK):
                file.write(block)
                bar.update(len(block))
    size = part.stat().st_size
    if total is not None and size != total:
        raise ConnectionError(f"the transfer broke off after {size:,} of {total:,} bytes")


def _wrong_digest(path: Path, source: Download) -> str:
    """Why the file is not the expected one, or nothing."""
    for name, wanted in (("sha256", source.sha256), ("md5", source.md5)):
        if wanted and (found := digest_of(path, name)) != wanted:
            return f"its {name} is {found}, not {wanted}"
    return ""
