"""``fairseq-interactive`` under load: every line is answered in order, whatever is in it, and memory stays flat."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_ms.errors import UsageError
from fairseq_ms.host.interactive import Numbered
from tests.helpers.cli import USER_DIR, environment
from tests.helpers.trained import NARROW, TINY, random_lines, write_checkpoint, write_corpus

POSITIONS = 24
LINES = 200

# Control characters, unknown and special symbols, what a terminal or another encoding writes, and no UTF-8 at all.
ODD = [b"\0", b"\1\2", b"\x1b[31m", b"\x0b", b"\x0c", b"\x1c", b"\r", b"\t", b"unseen", b"<pad>", b"<s>", b"<unk>"]
ODD += [b"\xff\xfe", b"\xc3\x28", b"\xe2\x82", b"\x85", b"\xed\xa0\x80", "\x85 \u2028 é 😀".encode()]

CHUNKS = ["--decoder-embed-dim", "16", "--position-embed-dim", "4", "--decoder-layers", "1", "--decoder-units", "12"]
CHUNKS += ["--decoder-ffn-embed-dim", "24", "--max-segment-len", "5"]
MODELS = {
    "vanilla_lm": (TINY, "language_modeling"),
    "haed": (CHUNKS, "language_modeling"),
    "transformer_ql": ([*NARROW, "--scale-layers", "1x=1,2x=1", "--mem-len", "6"], "streaming_language_modeling"),
}


def odd_lines(count: int, lengths: tuple[int, ...], seed: int = 3) -> list[bytes]:
    """Lines of words of the dictionary, of which one in ten is something else."""
    rng = random.Random(seed)
    return [
        b" ".join(
            rng.choice(ODD) if rng.random() < 0.1 else f"w{rng.randrange(30)}".encode()
            for _ in range(rng.choice(lengths))
        )
        for _ in range(count)
    ]


def tokens_of(line: bytes) -> int:
    """What the line takes, its end included."""
    return len(line.decode("utf-8", errors="replace").split()) + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interactive")
    write_corpus(folder / "data", {"train": random_lines(1, 50)})
    return folder


def command(folder: Path, arch: str, *more: str) -> list[str]:
    flags, task = MODELS[arch]
    path = folder / f"{arch}.pt"
    if not path.exists():
        segment = "4" if task.startswith("streaming") else str(POSITIONS)
        write_checkpoint(path, folder / "data", arch, *flags, "--tokens-per-sample", segment, task=task)
    load = ["--user-dir", str(USER_DIR), "--task", task, "--path", str(path), "--cpu", "--beam", "1", "--max-len-b"]
    return ["fairseq-interactive", str(folder / "data"), *load, "3", *more]


def answered(printed: str) -> list[int]:
    """The numbers of the lines in the order of their answers."""
    return [int(number) for number in re.findall(r"^H-(\d+)\t", printed, re.MULTILINE)]


def resident(process: int) -> int:
    """The memory of a process in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("arch", MODELS)
def test_every_line_with_room_is_answered_in_order_and_memory_is_flat(arch: str, folder: Path) -> None:
    lines = odd_lines(LINES, (0, 1, 2, 5, 22, 23, 24, 25, 60, 300))
    source = folder / f"{arch}.txt"
    source.write_bytes(b"\n".join(lines) + b"\n")
    skip = "--skip-invalid-size-inputs-valid-test"
    name, *arguments = command(folder, arch, "--buffer-size", "50", "--batch-size", "25", skip, "--input", str(source))
    log = source.with_suffix(".log")
    process = subprocess.Popen(
        [sys.executable, str(Path(sys.executable).parent / name), *arguments],
        env=environment({"PYTHONUNBUFFERED": "1"}),
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
    )
    printed, sizes = [], []
    assert process.stdout is not None
    for line in process.stdout:
        printed.append(line)
        if line.startswith("H-"):
            sizes.append(resident(process.pid))
    assert process.wait() == 0, log.read_text()[-3000:]
    room = [number for number, line in enumerate(lines) if arch == "transformer_ql" or tokens_of(line) <= POSITIONS]
    assert answered("".join(printed)) == room
    # After the first third, what grows is what torch's kernels keep of each new shape: less than 0.05 MB a line.
    third = len(sizes) // 3
    assert max(sizes[third:]) - max(sizes[:third]) < 50e3 * LINES


def batches(lines: list[str], cfg: Any, task: Any, longest: int) -> Any:
    """Batches of one line, as fairseq makes them: it leaves out lines that are too long, or raises."""
    task.dataset_to_epoch_iter[len(lines)] = lines
    for place, line in enumerate(lines):
        if len(line) > longest and cfg.skip:
            continue
        if len(line) > longest:
            raise Exception(
                f"Size of sample #{place} is invalid (=({len(line)}, 0)) since max_positions={longest}, skip"
            )
        yield SimpleNamespace(ids=torch.tensor([place]), line=line)


def none(*args: Any) -> None:
    """fairseq's reading, which is not used."""


def test_a_line_ends_at_a_line_feed_alone_and_may_hold_any_bytes(tmp_path: Path) -> None:
    source = tmp_path / "lines"
    source.write_bytes("\ufeffa\rb\nc\r\n\nd\x85e\u2028f\n".encode() + b"g\xff h\n\xc3\nlast")
    buffers = list(Numbered().read(none, str(source), 3))
    assert [len(buffer) for buffer in buffers] == [3, 3, 1]
    assert list(itertools.chain(*buffers)) == ["a\rb", "c\r", "", "d\x85e\u2028f", "g\ufffd h", "\ufffd", "last"]
    with pytest.raises(UsageError, match=r"^--input must be a file that can be read: got .*none \(No such file"):
        list(Numbered().read(none, str(tmp_path / "none"), 3))


def test_lines_without_room_are_named_by_their_numbers_in_the_input_and_no_buffer_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "lines"
    source.write_text("aa\nb\nc\nddd\nee\nf\n")
    task = SimpleNamespace(dataset_to_epoch_iter={})
    reader = Numbered()
    answered = []
    for buffer in reader.read(none, str(source), 2):
        answered += [batch.line for batch in reader.batch(batches, buffer, SimpleNamespace(skip=True), task, 1)]
        assert not task.dataset_to_epoch_iter
    assert answered == ["b", "c", "f"]
    assert [record.message.partition(": ")[2] for record in caplog.records] == ["line 1", "line 4", "line 5"]
    reader = Numbered()
    buffers = reader.read(none, str(source), 2)
    assert len(list(reader.batch(batches, next(buffers), SimpleNamespace(skip=False), task, 2))) == 2
    sentence = r"^--skip-invalid-size-inputs-valid-test must be given .* the model's 2 positions: line 4 has 3 tokens$"
    with pytest.raises(UsageError, match=sentence):
        list(reader.batch(batches, next(buffers), SimpleNamespace(skip=False), task, 2))


@pytest.mark.parametrize("name", ["score_reference", "prefix_size", "lm_path"])
def test_what_fairseq_interactive_would_ignore_is_refused(name: str) -> None:
    cfg = SimpleNamespace(generation=SimpleNamespace(**{name: 2}))
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} must be left out, .* lines without a reference"):
        list(Numbered().batch(batches, ["a"], cfg, SimpleNamespace(dataset_to_epoch_iter={}), 1))
