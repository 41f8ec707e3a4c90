"""Write a checkpoint as a folder that Hugging Face's transformers loads without fairseq."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fairseq_ms.tools.arguments import add_data, add_flag, place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "file of fairseq-train, or of plain_pytorch/train.py"
    parser.add_argument("checkpoint", type=place, metavar="CHECKPOINT", help=help)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    add_data(parser)
    known = "(default: what manifest.json in or above --data says)"
    add_flag(
        parser,
        "--level",
        "--symbols",
        metavar="KIND",
        help=f"word, bpe, hf_byte_bpe, hf_tokenizer, char or byte {known}",
    )
    before = f"what comes before the symbols {known}"
    add_flag(parser, "--tokenise", "--tokenize", choices=("moses", "none"), help=before)
    parser.add_argument("--language", metavar="CODE", help="of Moses (default: the manifest's, or en)")
    parser.add_argument("--bpe-codes", type=Path, metavar="FILE", help="BPE operations (default: beside it)")
    of_model = "of the model, as the Hub names it (default: unknown)"
    of_data = "of the training data (default: unknown)"
    add_flag(parser, "--license", "--licence", default="unknown", metavar="ID", help=of_model)
    add_flag(parser, "--data-license", "--data-licence", default="unknown", metavar="TEXT", help=of_data)
    parser.add_argument("--fp16", action="store_true", help="weights in half precision")
    help = "leave our Python out: fairseq-ms alone reads the folder then, and transformers does not"
    parser.add_argument("--no-python", action="store_true", help=help)
    help = "numbers for the card, as fairseq-ms perplexity --json writes them"
    parser.add_argument("--perplexity", type=Path, nargs="+", default=[], metavar="FILE", help=help)


def run(args: argparse.Namespace) -> None:
    from fairseq_ms.export import folder
    from fairseq_ms.tools import loading, report, tokenizing

    report.require_package("safetensors", "fairseq-ms export", "safetensors")
    checkpoint = loading.load(args.checkpoint, args.data, cpu=True)
    pipeline = tokenizing.pipeline_of(checkpoint.folder, args.level, args.tokenise, args.language, args.bpe_codes)
    if args.fp16:
        checkpoint.model.half()
    folder.write(args.out, checkpoint, pipeline, args)
    print(f"{args.out}: {folder.class_name(type(checkpoint.core))}")
    print(f"next: fairseq-ms sample {shlex.quote(str(args.out))} --prompt TEXT")
