"""Checkpoints that several tests of commands read."""

import json
from pathlib import Path
from typing import Any

from fairseq_ms.cli import main
from tests.helpers.trained import NARROW, TINY, random_lines, write_checkpoint, write_corpus

ARCHITECTURES = {
    "retina": ["retina_lm", *TINY, "--scale-windows", "1x=0:4,4x=4:32"],
    "vanilla": ["vanilla_lm", *TINY],
    "topdown": ["multiscale_topdown", *NARROW, "--scale-layers", "16x=1,4x=1,1x=1"],
    "bottomup": ["multiscale_bottomup", *NARROW, "--scale-layers", "16x=1,4x=1,1x=1"],
    "coarse": ["coarse_lm", *NARROW, "--scale-layers", "4x=1"],
    "haed": ["haed"],
}
STREAMING = {
    "transformer_xl": ["--decoder-layers", "2", "--mem-len", "5"],
    "compressive_transformer": ["--decoder-layers", "2", "--mem-len", "4", "--compressed-mem-len", "2"],
    "transformer_ql": ["--scale-layers", "1x=1,2x=1", "--mem-len", "5", "--output-layers", "1"],
}
"""Models with a memory, read in segments of 6 tokens."""


def write_models(folder: Path) -> Path:
    """NAME/model.pt of each of ``ARCHITECTURES`` and ``STREAMING``, untrained, and their data in ``bin``; the folder.

    Lines have 17 words and an end, so that segments of 18 tokens are lines. Line 31 is line 5 again.
    """
    train = random_lines(1, 40)
    train[31] = train[5]
    data = write_corpus(folder / "bin", {"train": train, "test": random_lines(2, 31)})
    for name, flags in ARCHITECTURES.items():
        write_checkpoint(folder / name / "model.pt", data, *flags, "--tokens-per-sample", "64")
    for name, flags in STREAMING.items():
        write_stream(folder / name / "model.pt", data, name, *flags)
    return folder


def write_stream(path: Path, data: Path, arch: str, *flags: str) -> Path:
    """Write a checkpoint of a small untrained model with a memory."""
    sizes = [*NARROW, *flags, "--tokens-per-sample", "6", "--init-std", "0.3"]
    return write_checkpoint(path, data, arch, *sizes, task="streaming_language_modeling")


def answer(folder: Path, *command: str) -> dict[str, Any]:
    """What a command writes with --json; it draws a figure, too."""
    assert main([*command, "--json", str(folder / "out.json"), "--png", str(folder / "out.png")]) == 0
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return dict(json.loads((folder / "out.json").read_text()))


def assert_refused(words: list[str], sentence: str, capsys: Any) -> None:
    """A command says one sentence, and nothing before it."""
    try:
        code: object = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
