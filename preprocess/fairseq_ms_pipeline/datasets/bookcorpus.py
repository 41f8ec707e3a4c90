"""Prepare the Toronto BookCorpus: 30k BPE, random split."""

from __future__ import annotations

from dataclasses import replace

from fairseq_ms_pipeline.cli import prepare_files
from fairseq_ms_pipeline.dataset import Dataset, Download, Expected

TABLE_1 = "Table 1 of the multi-scale paper"

SENTENCES = Dataset(
    name="bookcorpus",
    title="Toronto BookCorpus",
    bpe_merges=30000,
    # The two files have no borders between books; runs of lines keep the context within a piece.
    documents="lines:2000",
    blank_lines="drop",
    text_names=("books_large_p1.txt", "books_large_p2.txt"),
    valid_fraction=0.103,
    test_fraction=0.101,
    downloads=(
        Download(
            "https://storage.googleapis.com/huggingface-nlp/datasets/bookcorpus/bookcorpus.tar.bz2",
            "bookcorpus.tar.bz2",
            md5="5c906ede3c5265f8934b62c275a754bc",
        ),
    ),
    expected=(
        Expected("train", "targets", 832e6, TABLE_1, tolerance=0.05),
        Expected("valid", "targets", 108e6, TABLE_1, tolerance=0.05),
        Expected("test", "targets", 106e6, TABLE_1, tolerance=0.05),
        Expected("vocabulary", "types", 31_300, TABLE_1, tolerance=0.02),
    ),
)
# Replicas keep each book in a file of its own, as it was written.
BOOKS = replace(SENTENCES, tokenise="moses", documents="file", text_names=("*.txt",), downloads=())


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    help = "sentences: books_large_p1/p2.txt, tokenised; books: one file a book, raw (default: sentences)"
    return prepare_files(__doc__, {"sentences": SENTENCES, "books": BOOKS}, "--layout", help)
