"""`fairseq-ms export CHECKPOINT OUT`: a checkpoint as a folder for Hugging Face's transformers."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint and the folder, and what the checkpoint does not say."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="file that fairseq-train wrote")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--data", help="folder that fairseq-preprocess wrote (default: the one trained on)")
    known = "(default: what manifest.json in or above --data says)"
    parser.add_argument("--symbols", metavar="KIND", help=f"word, bpe, char or byte {known}")
    parser.add_argument("--tokenise", choices=("moses", "none"), help=f"what comes before the symbols {known}")
    parser.add_argument("--language", metavar="CODE", help="of Moses (default: the manifest's, or en)")
    parser.add_argument("--bpe-codes", type=Path, metavar="FILE", help="BPE operations (default: codes.bpe beside it)")
    parser.add_argument(
        "--license", default="unknown", metavar="ID", help="of the model, as the Hub names it (default: unknown)"
    )
    parser.add_argument(
        "--data-license", default="unknown", metavar="TEXT", help="of the training data (default: unknown)"
    )
    parser.add_argument(
        "--perplexity",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="numbers for the card, as fairseq-ms perplexity --json writes them",
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder; returns 0."""
    from fairseq import utils

    from fairseq_ms.analysis import checkpoints, report
    from fairseq_ms.analysis.arguments import quieten
    from fairseq_ms.export import folder, tokenizer
    from fairseq_ms.export.card import Facts

    report.require_package("safetensors", "fairseq-ms export", "safetensors")
    quieten()
    checkpoint = checkpoints.load(args.checkpoint, args.data, cpu=True)
    folder.check(checkpoint)
    data = Path(utils.split_paths(str(checkpoint.task.args.data))[0])
    pipeline = tokenizer.pipeline_of(data, args.symbols, args.tokenise, args.language, args.bpe_codes)
    facts = Facts(args.license, args.data_license, args.perplexity)
    folder.write(args.out, checkpoint, pipeline, facts)
    print(f"{args.out}: {folder.class_name(type(checkpoint.model.decoder.core))}")
    return 0
