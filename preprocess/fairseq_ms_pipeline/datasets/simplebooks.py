"""Prepare SimpleBooks-2 or SimpleBooks-92 by words."""

from __future__ import annotations

from fairseq_ms_pipeline.cli import prepare_files
from fairseq_ms_pipeline.dataset import SPLITS, Dataset, Download, Expected

TABLE_4 = "Table 4 of the Transformer-QL paper"


def declared(size: str, tokens: float, types: int) -> Dataset:
    """SimpleBooks-2 or -92: the same archive, another folder in it."""
    return Dataset(
        name=f"simplebooks{size}",
        title=f"SimpleBooks-{size}",
        level="word",
        split_names={split: (f"simplebooks-{size}/{split}.txt",) for split in SPLITS},
        downloads=(Download("https://dldata-public.s3.us-east-2.amazonaws.com/simplebooks.zip", "simplebooks.zip"),),
        expected=(
            Expected("train", "words", tokens, TABLE_4, tolerance=0.05),
            Expected("vocabulary", "types", types, TABLE_4, tolerance=0.01),
        ),
    )


def main() -> int:
    """Prepare what the command line asks for; returns the exit code."""
    variants = {"2": declared("2", 2.2e6, 11_492), "92": declared("92", 91.5e6, 98_304)}
    return prepare_files(__doc__, variants, "--size", "million words: 2 or 92 (default: 2)")
