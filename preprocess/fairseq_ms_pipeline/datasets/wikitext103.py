"""Prepare WikiText-103, by BPE (multi-scale models) or by words (Transformer-QL)."""

from __future__ import annotations

from dataclasses import replace

from fairseq_ms_pipeline.cli import prepare_files
from fairseq_ms_pipeline.dataset import Dataset, Download, Expected

TABLE_1 = "Table 1 of the multi-scale paper"
TABLE_4 = "Table 4 of the Transformer-QL paper"
RELEASE = "the release of WikiText-103"
ZIP = "wikitext-103-v1.zip"
ZIP_SHA256 = "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"

BPE = Dataset(
    name="wikitext103",
    title="WikiText-103",
    bpe_merges=32000,
    documents="wikitext",
    split_names={
        "train": ("wiki.train.tokens", "train.txt"),
        "valid": ("wiki.valid.tokens", "valid.txt"),
        "test": ("wiki.test.tokens", "test.txt"),
    },
    bpe_sample_bytes=600_000_000,
    downloads=(
        Download("https://wikitext.smerity.com/wikitext-103-v1.zip", ZIP, sha256=ZIP_SHA256),
        Download("https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip", ZIP, sha256=ZIP_SHA256),
    ),
    expected=(
        Expected("train", "words_with_eol", 103_227_021, RELEASE, tolerance=0),
        Expected("valid", "words_with_eol", 217_646, RELEASE, tolerance=0),
        Expected("test", "words_with_eol", 245_569, RELEASE, tolerance=0),
        Expected("train", "targets", 111e6, TABLE_1, tolerance=0.02),
        Expected("valid", "targets", 231e3, TABLE_1, tolerance=0.02),
        Expected("test", "targets", 261e3, TABLE_1, tolerance=0.02),
        Expected("vocabulary", "types", 33_346, TABLE_1, tolerance=0.02),
    ),
)
WORD = replace(
    BPE,
    level="word",
    expected=(
        *BPE.expected[:3],
        Expected("train", "targets", 103e6, TABLE_4),
        Expected("vocabulary", "types", 267_735, TABLE_4, tolerance=0),
    ),
)


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    return prepare_files(__doc__, {"bpe": BPE, "word": WORD}, "--level", "subwords or words (default: bpe)")
