"""The manifest: what was made of which input by which versions, and the counts that evaluation divides by."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
from pathlib import Path
from typing import Any

from fairseq_ms_pipeline.dataset import SPLITS, Dataset
from fairseq_ms_pipeline.files import Json, read_json, sha256_of

NAME = "manifest.json"
# Data sets of one's own, or as good as that. Four passes over their text, with the updates of a preset for long texts:
# of so many tokens, and no more than half an hour of a core, nor fewer than its warm-up takes.
_OWN = ("text", "code", "stdlib_docs")
_UPDATE, _FEWEST, _MOST = 4096, 100, 1200
_PRESETS = {"chars": "haed_small", "images": "pixels_haed"}
PACKAGES = ("fairseq", "fairseq-fixed", "numpy", "sacremoses", "subword-nmt", "tokenizers", "torch")


def read(folder: Path, flag: str) -> Json:
    """The manifest of a folder that `flag` names; ValueError where another program wrote it."""
    found = read_json(folder / NAME)
    if not isinstance(found, dict) or not all(isinstance(found.get(key), dict) for key in ("settings", "files")):
        raise ValueError(f"{flag} {folder}: its {NAME} is not of fairseq-ms prepare: name another folder.")
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the result, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def split_counts(shards: list[str], documents: int, text: Path, binary: Path) -> dict[str, int]:
    """The sums of a split's shard counts.

    words_with_eol: words plus one end of line each, what word-level perplexity divides by.
    bytes, characters: of the tokenised text with its line ends. source_bytes: of the text before
    tokenisation.
    targets: subwords (or words) plus ends of line, what the language model is scored on.
    """
    total: dict[str, int] = {"documents": documents, "shards": len(shards)}
    for name in shards:
        for folder in (text, binary):
            for key, count in read_json(folder / f"{name}.json").items():
                total[key] = total.get(key, 0) + count
    total["words_with_eol"] = total["words"] + total["lines"]
    return total


def checksums(folder: Path) -> dict[str, Json]:
    """Size and SHA-256 of every file below `folder`, by its relative name; links are of files that are listed."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in files
    }


def encoders_of(settings: Json, folder: Path) -> dict[str, dict[str, Any]]:
    """What fairseq has for the pipeline of a prepared folder: its tokenizer and its BPE, each with its settings.

    It has nothing for characters and bytes.
    """
    language = settings.get("language", "en")
    found: dict[str, dict[str, Any]] = {}
    if settings.get("tokenise") == "moses":
        found["tokenizer"] = {"_name": "moses", "moses_no_dash_splits": True, "moses_no_escape": True}
        found["tokenizer"] |= {"source_lang": language, "target_lang": language}
    if settings["level"] == "bpe":
        # subword-nmt takes no tab for white space.
        found.setdefault("tokenizer", {"_name": "space"})
        found["bpe"] = {"_name": "subword_nmt", "bpe_codes": str(folder / "codes.bpe")}
    if settings["level"] == "hf_byte_bpe":
        files = {"bpe_vocab": str(folder / "vocab.json"), "bpe_merges": str(folder / "merges.txt")}
        found["bpe"] = {"_name": "hf_byte_bpe", **files}
    return found


def last_words(manifest: Json, folder: Path) -> str:
    """What `prepare` says last: the flags that fairseq has for this text, if any, and what comes next."""
    flags = []
    for group, chosen in encoders_of(manifest["settings"], folder).items():
        flags += [f"--{group}", chosen.pop("_name")]
        # fairseq's default language is left out.
        given = {f"--{name.replace('_', '-')}": value for name, value in chosen.items() if value != "en"}
        flags += [part for flag, value in given.items() for part in (flag, value) if part is not True]
    says = f"fairseq's commands read prompts as {NAME} says; without it they need\n  {shlex.join(flags)}\n"
    return f"{says if flags else ''}next: {next_command(manifest, folder)}"


def differences(dataset: Dataset, manifest: Json) -> list[str]:
    """One sentence for each count that is not what the data set's papers print."""
    found = []
    for expected in dataset.expected:
        part = manifest["vocabulary"] if expected.split == "vocabulary" else manifest["splits"][expected.split]
        value = part.get(expected.count)
        if value is not None and abs(value - expected.value) > expected.tolerance * expected.value:
            found.append(
                f"{expected.split} has {value:,} {expected.count.replace('_', ' ')}, "
                f"where {expected.source} has {expected.value:,.0f}."
            )
    return found


def table(manifest: Json) -> str:
    """The counts of all splits as a table to read: what they take of the bytes, and tokens, first."""
    splits = {split: dict(manifest["splits"][split]) for split in SPLITS}
    for counts in splits.values():
        counts |= {"tokens": counts["targets"], "bytes": counts.get("source_bytes", counts.get("bytes"))}
    wanted = ("documents", "images", "lines", "words", "words_with_eol", "unknown")
    columns = ["bytes", "tokens", *(column for column in wanted if column in splits[SPLITS[0]])]
    columns = [column for column in columns if splits[SPLITS[0]][column] is not None]
    rows = [["split", *columns]]
    for split, counts in splits.items():
        rows.append([split, *(f"{counts[column]:,}" for column in columns)])
        if "bytes" in columns:
            rows[-1][1] += f" ({counts['bytes'] / sum(other['bytes'] for other in splits.values()):.1%})"
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:])) for row in rows]
    lines = [f"  {row[0]:<{widths[0]}}  {line}" for row, line in zip(rows, lines)]
    vocabulary = manifest["vocabulary"]
    average = manifest["splits"]["train"]["targets"] / vocabulary["types"]
    lines.append(
        f"  {vocabulary['types']:,} types, each {average:,.2f} times in train on average, "
        f"{vocabulary['dictionary_size']:,} symbols in the dictionary"
    )
    return "\n".join(lines)


def next_command(manifest: Json, folder: Path) -> str:
    """What trains on a prepared folder."""
    data, name = shlex.quote(str(folder / "bin")), manifest["dataset"]
    if name in _OWN:
        updates = 4 * manifest["splits"]["train"]["targets"] // _UPDATE
        most = max(_FEWEST, min(_MOST, updates))
        return f"fairseq-ms train retina_lm_long_2048 --data {data} --max-update {most}"
    if name in _PRESETS:
        return f"fairseq-ms train {_PRESETS[name]} --data {data}"
    return "fairseq-ms config --list --papers, which names a preset for fairseq-ms train PRESET --data " + data
