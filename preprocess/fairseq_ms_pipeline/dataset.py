"""The declaration of a data set: everything in which one data set differs from another."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

SPLITS = ("train", "valid", "test")
# What BPE has learnt, in files of a prepared folder.
CODES = {"bpe": ("codes.bpe",), "hf_byte_bpe": ("vocab.json", "merges.txt"), "hf_tokenizer": ("tokenizer.json",)}
# Levels that take text as it is, and whose symbols are the numbers of tokens.
NUMBERED = ("hf_byte_bpe", "hf_tokenizer")


def languages() -> list[str]:
    """Those that Moses has rules for."""
    from sacremoses.corpus import NonbreakingPrefixes

    return sorted({*NonbreakingPrefixes().available_langs.values(), "cjk", "ja", "ko"})


def check_all(*rules: tuple[bool, str, object]) -> None:
    """Raise ValueError for the first rule that does not hold: whether it does, the rule, and the value."""
    for holds, rule, value in rules:
        if not holds:
            raise ValueError(f"{rule}, not {value!r}.")


@dataclass(frozen=True)
class Download:
    """One address of a data set's file with what is known of the file.

    `sha256` or `md5` are lower-case hexadecimal digests; empty means that no digest is published.
    """

    url: str
    file_name: str
    sha256: str = ""
    md5: str = ""


@dataclass(frozen=True)
class Expected:
    """A count that a paper prints for a data set, compared with ours once the data is prepared.

    `count` names a field of the manifest's split (`words`, `targets`, `words_with_eol`, ...) or, with the
    split `vocabulary`, one of its fields. `tolerance` is relative and covers the rounding of the printed
    number.
    """

    split: str
    count: str
    value: float
    source: str
    tolerance: float = 0.01


@dataclass(frozen=True)
class Dataset:
    """How a data set is laid out and what is made of it.

    level: `bpe` (subword-nmt), `hf_byte_bpe` (tokenizers, which takes text as it is), `hf_tokenizer` (the same, with
    any tokenizer.json), `word`, `char` or `byte`.
    tokenise: `moses` (sacremoses) or `none` (already tokenised).
    language: of Moses, one of ``languages``.
    documents: what a document is, the unit of a random split: `file`, `blank` (separated by empty lines),
    `line`, `lines:N` (runs of N lines) or `wikitext` (headings like ` = Title = `); `ends` splits by bytes instead,
    whole files and the ends of long ones.
    blank_lines: `keep` (an empty line is a lone end-of-line token) or `drop`.
    json_names, json_fields: files of articles (JSON and tables), and the fields in which their text is.
    split_names: for a data set whose split is given, the file-name patterns of each split; empty otherwise.
    valid_fraction, test_fraction: for a random split.
    dictionary_size: most frequent symbols to keep, 0 for all.
    """

    name: str
    title: str
    level: str = "bpe"
    bpe_merges: int = 32000
    tokenise: str = "none"
    language: str = "en"
    documents: str = "file"
    blank_lines: str = "keep"
    text_names: tuple[str, ...] = ("*.txt",)
    json_names: tuple[str, ...] = ()
    json_fields: tuple[str, ...] = ()
    split_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    dictionary_size: int = 0
    shard_bytes: int = 8_000_000
    bpe_sample_bytes: int = 200_000_000
    bpe_sample_types: int = 200_000
    downloads: tuple[Download, ...] = ()
    expected: tuple[Expected, ...] = ()

    def check(self) -> None:
        """Raise ValueError, in one sentence, for a declaration or a flag that cannot work."""
        for name, needs, package in (
            ("--tokenise moses", self.tokenise == "moses", "sacremoses"),
            ("--bpe subword_nmt", self.level == "bpe", "subword-nmt"),
            ("--bpe hf_byte_bpe", self.level in NUMBERED, "tokenizers"),
        ):
            if needs and importlib.util.find_spec(package.replace("-", "_")) is None:
                raise ValueError(f"{name} needs the package {package}: run pip install {package}.")
        kind, _, size = self.documents.partition(":")
        known = kind in ("ends", "file", "blank", "line", "wikitext") and not size
        lossless, both = self.level in NUMBERED, self.valid_fraction + self.test_fraction
        shard, sample = self.shard_bytes, self.bpe_sample_bytes
        spoken = languages() if self.tokenise == "moses" else [self.language]
        check_all(
            (self.language in spoken, f"--language must be one of {', '.join(spoken)}", self.language),
            (not lossless or self.tokenise == "none", "--tokenise must be none with --bpe hf_byte_bpe", self.tokenise),
            (self.level not in CODES or self.bpe_merges >= 1, "--bpe-merges must be at least 1", self.bpe_merges),
            (self.dictionary_size >= 0, "--dict-size must be 0 (no limit) or more", self.dictionary_size),
            (1000 <= shard < math.inf, "--shard-mb must be at least 0.001 and finite", shard / 1e6),
            (1000 <= sample < math.inf, "--bpe-sample-mb must be at least 0.001 and finite", sample / 1e6),
            (0 < self.valid_fraction < 1, "--valid-fraction must lie between 0 and 1", self.valid_fraction),
            (0 < self.test_fraction < 1, "--test-fraction must lie between 0 and 1", self.test_fraction),
            (both < 1, "--valid-fraction and --test-fraction together must stay below 1", both),
            (
                known or (kind == "lines" and size.isdecimal() and int(size) > 0),
                "--documents must be ends, file, blank, line, lines:N or wikitext",
                self.documents,
            ),
        )
