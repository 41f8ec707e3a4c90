"""A small text in which everything stands that could be misread, and runs of the pipeline over it."""

import contextlib
import importlib
import io
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from fairseq_ms_pipeline.dataset import Dataset
from fairseq_ms_pipeline.documents import Reader
from fairseq_ms_pipeline.run import Job

DATASET = Dataset(
    name="sample",
    title="Sample",
    level="bpe",
    bpe_merges=120,
    tokenise="moses",
    documents="blank",
    blank_lines="drop",
    valid_fraction=0.2,
    test_fraction=0.2,
    shard_bytes=1500,
)
ODD = ["<unk>", "</s>", "<s>", "name@@", "@@", "a@@@", "x</s>", "naïve", "東京", "\u00a0", "\u2028", "\\", "<pad>"]


def write_sample(path: Path, lines: int = 160, seed: int = 3) -> Path:
    """Text of a few hundred made-up words in which everything stands that could be misread."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 9))) for _ in range(150)] + ODD
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for index in range(lines):
            file.write(" ".join(draw.choices(words, k=draw.randint(1, 12))) + ".\n")
            if index % 3 == 0:
                file.write("\n")
    return path


def job_of(source: Path, out: Path, dataset: Dataset = DATASET, workers: int = 1, **more) -> Job:
    return Job(
        dataset=dataset,
        lines=Reader(dataset, [source], seed=1).lines,
        source_bytes=None,
        out=out,
        workers=workers,
        identity={"inputs": [{"name": source.name, "bytes": source.stat().st_size}], "seed": 1},
        quiet=True,
        **more,
    )


def archived(path: Path, files: Mapping[str, str | bytes]) -> Path:
    """A zip or a compressed tar of files, by its ending."""
    contents = {name: content.encode() if isinstance(content, str) else content for name, content in files.items()}
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w:bz2") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder with their content."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def prepare(dataset: str, *flags: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a data set's script in this process, with one worker and without progress bars; `check` as in `run_cli`."""
    more = [] if dataset == "images" else ["--workers", "1"]
    out, err = io.StringIO(), io.StringIO()
    main = importlib.import_module(f"fairseq_ms_pipeline.datasets.{dataset}").main
    command = ["prepare.py", *map(str, flags), *more, "--quiet"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    assert not (check and code), err.getvalue()
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())
