"""Prepare CC-News: 30k BPE learnt on a sample, a vocabulary of 63,724 types, random split, any size."""

from __future__ import annotations

from fairseq_ms_pipeline.cli import prepare_files
from fairseq_ms_pipeline.dataset import Dataset, Expected

TABLE_1 = "Table 1 of the multi-scale paper"

DATASET = Dataset(
    name="cc_news",
    title="CC-News",
    bpe_merges=30000,
    tokenise="moses",
    # An article of a JSON file is a document whatever is said here; in text files an empty line ends one.
    documents="blank",
    blank_lines="drop",
    json_names=("*.json", "*.jsonl"),
    json_fields=("title", "maintext", "text", "plain_text"),
    valid_fraction=0.0213,
    test_fraction=0.0213,
    dictionary_size=63_724,
    shard_bytes=64_000_000,
    expected=(
        Expected("train", "targets", 16.6e9, TABLE_1, tolerance=0.05),
        Expected("valid", "targets", 370e6, TABLE_1, tolerance=0.05),
        Expected("test", "targets", 370e6, TABLE_1, tolerance=0.05),
        Expected("vocabulary", "dictionary_size", 63_724, TABLE_1, tolerance=0.001),
    ),
)


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    return prepare_files(__doc__, {"": DATASET})
