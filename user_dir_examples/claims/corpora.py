"""The data folders of the claims, made from one folder of documents."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Corpus:
    """An excerpt and how it is prepared.

    Attributes:
        words: of the training text, by white space, at most; valid and test have a tenth of it each
        command: data set and flags of `fairseq-ms prepare`
    """

    words: int
    command: Sequence[str]


# However much text there is, validation must not take longer than training.
MOST_HELD_OUT = 100_000
_WORDS = ("text", "--level", "word", "--dict-size", "8000")


CORPORA = {
    # Small enough for 28 epochs.
    "words": Corpus(120_000, _WORDS),
    "many_words": Corpus(3_000_000, _WORDS),
    "some_subwords": Corpus(1_500_000, ("text", "--bpe-merges", "8000")),
    "subwords": Corpus(10_000_000, ("text", "--bpe-merges", "8000")),
    "characters": Corpus(360_000, ("chars",)),
}


def excerpt(folder: Path, words: int) -> str:
    """As many words from the beginning of each document of a folder, whole paragraphs, a line each."""
    documents = sorted(folder.glob("*.txt"))
    if not documents:
        raise SystemExit(
            f"claims: TEXT must have train/, valid/ and test/ with *.txt files: there are none in {folder}"
        )
    share, lines = words / len(documents), []
    for document in documents:
        taken = 0
        for paragraph in document.read_text(encoding="utf-8").splitlines():
            if taken >= share:
                break
            if paragraph.strip():
                lines.append(paragraph.strip())
                taken += len(paragraph.split())
    return "\n".join(lines) + "\n"


def prepare(name: str, text: Path, out: Path) -> Path:
    """The folder that fairseq reads, made unless it is there."""
    corpus, folder = CORPORA[name], out / "data" / name
    if not (folder / "manifest.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        source = out / "data" / f"{name}.text"
        source.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            words = corpus.words if split == "train" else min(MOST_HELD_OUT, corpus.words // 10)
            (source / f"{split}.txt").write_text(excerpt(text / split, words), encoding="utf-8")
        command = [sys.executable, "-m", "fairseq_ms", "prepare", *corpus.command, "--input", str(source)]
        done = subprocess.run([*command, "--out", str(folder), "--quiet"], check=False)
        if done.returncode:
            raise SystemExit(f"claims: preparing {name} ended with exit code {done.returncode}")
    return folder / "bin"


def targets(data: Path) -> int:
    """Tokens of the training split that a model is scored on."""
    manifest = json.loads((data.parent / "manifest.json").read_text(encoding="utf-8"))
    return int(manifest["splits"]["train"]["targets"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, metavar="TEXT", help="folder with train/*.txt, valid/*.txt and test/*.txt")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name in CORPORA:
        print(prepare(name, args.text, args.out))


if __name__ == "__main__":
    main()
