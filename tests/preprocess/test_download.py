"""Downloads against a server on this machine: resume, broken transfers, wrong checksums, several sources."""

import argparse
import hashlib
import http.server
import re
import threading
import zipfile
from functools import partial

import pytest

from fairseq_ms_pipeline.dataset import Download
from fairseq_ms_pipeline.download import fetch

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with ranges; `behaviour` holds what goes wrong and what was asked."""

    def __init__(self, behaviour, *args):
        self.behaviour = behaviour
        super().__init__(*args)

    def do_GET(self):
        asked = self.headers.get("Range")
        self.behaviour["requests"].append((self.path, asked))
        content = self.behaviour.get("content", CONTENT)
        if self.path == "/missing":
            self.send_error(404, "Not Found")
            return
        start = 0
        same = self.headers.get("If-Range") in (None, self.behaviour["etag"])
        if asked and same and self.behaviour["ranges"]:
            wanted = re.fullmatch(r"bytes=(\d+)-", asked)
            assert wanted is not None, asked
            start = int(wanted.group(1))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        if self.behaviour["etag"]:
            self.send_header("ETag", self.behaviour["etag"])
        self.end_headers()
        # A broken transfer: the promised length is never sent.
        limit = self.behaviour["breaks"].pop(0) if self.behaviour["breaks"] else None
        self.wfile.write(content[start:][:limit])

    def log_message(self, *args):
        """Silence."""


@pytest.fixture(autouse=True)
def _directly(monkeypatch):
    """What is on this machine is not asked for through anybody's proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server():
    behaviour = {"requests": [], "breaks": [], "ranges": True, "etag": '"one"'}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, behaviour)) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}", behaviour
        listening.shutdown()


def one(url: str, **digests) -> tuple[Download, ...]:
    return (Download(url, "data.zip", **digests),)


def test_a_file_is_fetched_once_and_checked(server, tmp_path):
    url, behaviour = server
    sources = one(f"{url}/data.zip", sha256=SHA256)
    for _ in range(2):
        path = fetch(sources, tmp_path / "new" / "folder", quiet=True)
        assert path.read_bytes() == CONTENT
    assert behaviour["requests"] == [("/data.zip", None)]
    assert [file.name for file in path.parent.iterdir()] == ["data.zip"]


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(server, tmp_path):
    url, behaviour = server
    behaviour["breaks"] = [300_000, 100_000]
    path = fetch(one(f"{url}/data.zip", md5=MD5), tmp_path, quiet=True)
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in behaviour["requests"]] == [None, "bytes=300000-", "bytes=400000-"]


def test_what_an_interrupted_run_has_fetched_is_not_fetched_again(server, tmp_path):
    url, behaviour = server
    behaviour["breaks"] = [200_000, 0, 0]
    with pytest.raises(ValueError, match="broke off after 200,000 of 1,024,000 bytes"):
        fetch(one(f"{url}/data.zip"), tmp_path, quiet=True)
    assert not (tmp_path / "data.zip").exists()
    behaviour["requests"].clear()
    assert fetch(one(f"{url}/data.zip"), tmp_path, quiet=True).read_bytes() == CONTENT
    assert behaviour["requests"] == [("/data.zip", "bytes=200000-")]


def test_a_file_that_changed_on_the_server_is_fetched_from_the_start(server, tmp_path):
    url, behaviour = server
    behaviour["breaks"] = [200_000, 0, 0]
    with pytest.raises(ValueError, match="broke off"):
        fetch(one(f"{url}/data.zip"), tmp_path, quiet=True)
    behaviour.update(etag='"two"', content=CONTENT[::-1])
    assert fetch(one(f"{url}/data.zip"), tmp_path, quiet=True).read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("etag", ['"one"', None])
def test_a_server_without_ranges_sends_everything_again(server, tmp_path, etag):
    url, behaviour = server
    behaviour.update(ranges=False, breaks=[200_000], etag=etag)
    assert fetch(one(f"{url}/data.zip"), tmp_path, quiet=True).read_bytes() == CONTENT


def test_a_whole_file_left_under_its_part_name_is_taken_after_the_check(server, tmp_path):
    url, behaviour = server
    behaviour["breaks"] = [0, 0, 0]
    with pytest.raises(ValueError, match="broke off"):
        fetch(one(f"{url}/data.zip", sha256=SHA256), tmp_path, quiet=True)
    (tmp_path / "data.zip.part").write_bytes(CONTENT)
    assert fetch(one(f"{url}/data.zip", sha256=SHA256), tmp_path, quiet=True).read_bytes() == CONTENT


def test_the_next_source_is_tried_and_a_wrong_checksum_keeps_no_file(server, tmp_path):
    url, behaviour = server
    sources = one(f"{url}/missing", sha256=SHA256) + one(f"{url}/data.zip", sha256=SHA256)
    assert fetch(sources, tmp_path / "a", quiet=True).read_bytes() == CONTENT
    behaviour["content"] = CONTENT[:-1] + b"x"
    with pytest.raises(ValueError, match=r"--download failed from every source .*404.*; .*its sha256 is \w+, not"):
        fetch(sources, tmp_path / "b", quiet=True)
    assert not (tmp_path / "b").exists()


def test_a_wrong_file_that_is_there_already_is_refused_not_overwritten(server, tmp_path):
    url, behaviour = server
    (tmp_path / "data.zip").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"data.zip is there, but its sha256 is .*: remove it"):
        fetch(one(f"{url}/data.zip", sha256=SHA256), tmp_path, quiet=True)
    assert (tmp_path / "data.zip").read_bytes() == b"other"
    assert behaviour["requests"] == []


def test_no_network_is_one_sentence_that_names_every_source(tmp_path):
    sources = one("http://127.0.0.1:9/a.zip") + one("http://127.0.0.1:9/b.zip")
    with pytest.raises(ValueError, match=r"failed from every source \(http://127.0.0.1:9/a.zip: .*; .*b.zip: "):
        fetch(sources, tmp_path / "new", quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_script_downloads_only_when_asked_to_and_then_prepares(server, tmp_path, monkeypatch):
    from fairseq_ms_pipeline.cli import job_from_files, with_flags
    from fairseq_ms_pipeline.dataset import Dataset
    from fairseq_ms_pipeline.run import run

    url, behaviour = server
    names = {split: (f"{split}.txt",) for split in ("train", "valid", "test")}
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for split in names:
            archive.writestr(f"data/{split}.txt", "words and words\n" * 20)
    behaviour["content"] = (tmp_path / "data.zip").read_bytes()
    dataset = Dataset("tiny", "Tiny", level="word", split_names=names, downloads=one(f"{url}/data.zip"))

    flags = argparse.Namespace(
        input=(),
        download=tmp_path / "fetched",
        out=tmp_path / "out",
        workers=1,
        seed=None,
        vocab_from=None,
        dry_run=False,
        quiet=True,
    )
    assert with_flags(dataset, flags) == dataset
    manifest = run(job_from_files(dataset, flags))
    assert manifest["splits"]["valid"]["words"] == 60
    assert len(behaviour["requests"]) == 1
    flags.dry_run = True
    with pytest.raises(ValueError, match=f"--dry-run does not fetch: .* would try {url}/data.zip"):
        job_from_files(dataset, flags)
    flags.download = None
    with pytest.raises(ValueError, match="--input is missing"):
        job_from_files(dataset, flags)
    assert len(behaviour["requests"]) == 1
