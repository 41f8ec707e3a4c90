"""Prepare a data set: tokenised, split, segmented and binarised."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from unittest.mock import patch

from fairseq_ms.tools import report


def datasets() -> list[str]:
    """The data sets that can be prepared, by the names of their modules."""
    from fairseq_ms_pipeline import datasets

    return sorted(module.name for module in pkgutil.iter_modules(datasets.__path__))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The data set; its own flags are the data set's business."""
    parser.usage = "fairseq-ms prepare DATASET --out FOLDER [FLAGS OF THE DATA SET ...]"
    parser.add_argument("dataset", choices=datasets(), metavar="DATASET", help=", ".join(datasets()))
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help="flags: DATASET --help lists them")


def run(args: argparse.Namespace) -> int:
    if args.dataset == "images":
        report.require_package("PIL", "fairseq-ms prepare images", "pillow")
    module = importlib.import_module(f"fairseq_ms_pipeline.datasets.{args.dataset}")
    # Each data set reads its own command line, as its script does.
    with patch.object(sys, "argv", [f"fairseq-ms prepare {args.dataset}", *args.flags]):
        return int(module.main())
