"""Downloads against a server on this machine: resume, broken transfers, wrong checksums, several sources."""

import hashlib
import http.server
import threading
from dataclasses import replace
from functools import partial

import pytest

from fairseq_ms_pipeline.dataset import Download
from fairseq_ms_pipeline.datasets import wikitext103
from fairseq_ms_pipeline.download import fetch
from fairseq_ms_pipeline.files import read_json
from tests.preprocess.sample import archived, prepare

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
        if asked and self.behaviour["ranges"]:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        # A broken transfer: the promised length is never sent.
        limit = self.behaviour["breaks"].pop(0) if self.behaviour["breaks"] else None
        self.wfile.write(content[start:][:limit])

    def log_message(self, *args):
        """Silence."""


@pytest.fixture
def server(monkeypatch):
    # What is on this machine is not asked for through anybody's proxy.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    behaviour = {"requests": [], "breaks": [], "ranges": True}
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


def test_a_server_without_ranges_sends_everything_again(server, tmp_path):
    url, behaviour = server
    behaviour.update(ranges=False, breaks=[200_000])
    assert fetch(one(f"{url}/data.zip"), tmp_path, quiet=True).read_bytes() == CONTENT


def test_a_whole_file_left_under_its_part_name_is_taken_after_the_check(server, tmp_path):
    url, _ = server
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


def test_no_network_is_one_sentence_that_names_every_source(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    sources = one("http://127.0.0.1:9/a.zip") + one("http://127.0.0.1:9/b.zip")
    with pytest.raises(ValueError, match=r"failed from every source \(http://127.0.0.1:9/a.zip: .*; .*b.zip: "):
        fetch(sources, tmp_path / "new", quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_script_downloads_only_when_asked_to_and_then_prepares(server, tmp_path, monkeypatch):
    url, behaviour = server
    files = {f"wikitext-103/wiki.{split}.tokens": "words and words\n" * 20 for split in ("train", "valid", "test")}
    behaviour["content"] = archived(tmp_path / "data.zip", files).read_bytes()
    here = replace(wikitext103.WORD, downloads=one(f"{url}/data.zip"))
    monkeypatch.setattr(wikitext103, "WORD", here)
    flags = ("--level", "word", "--download", tmp_path / "fetched", "--out", tmp_path / "out")
    said = prepare("wikitext103", *flags, "--dry-run", check=False).stderr
    assert "--dry-run does not fetch: " in said
    assert f"would try {url}/data.zip" in said
    assert behaviour["requests"] == []
    prepare("wikitext103", *flags)
    assert read_json(tmp_path / "out" / "manifest.json")["splits"]["valid"]["words"] == 60
    assert len(behaviour["requests"]) == 1
