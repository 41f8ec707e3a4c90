"""The flags of the commands that import torch and fairseq, apart from them so that ``--help`` answers at once.

A function adds the flags of the command of its name to a parser.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_ms.tools.arguments import (
    add_checkpoints,
    add_choice,
    add_counts,
    add_cpu,
    add_data,
    add_flag,
    add_list,
    add_model,
    add_outputs,
    add_remove_bpe,
    add_scored,
    add_seed,
    add_window,
)

BOOKCORPUS = 31300
"""Symbols of BookCorpus, over which ``memory`` builds a model unless it is told otherwise."""


def coarse_completions(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser, "fairseq-train wrote with --arch coarse_lm")
    contexts = parser.add_mutually_exclusive_group(required=True)
    help = "what was read so far, tokenised and segmented as the training text (repeatable)"
    add_flag(contexts, "--text", "--context", action="append", metavar="TEXT", help=help)
    contexts.add_argument("--input", metavar="FILE", help="read the contexts from a file, one a line; - is stdin")
    add_counts(parser, ("--top", None, "words to print (default: as many as the scale has tokens)"))
    add_data(parser)
    add_cpu(parser)
    add_outputs(parser, figure=False)


def context_length(parser: argparse.ArgumentParser) -> None:
    add_model(parser, " | --paper")
    parser.add_argument("--paper", action="store_true", help="print every n_c of the paper's Tables 1, 3 and 5")
    parser.add_argument("--measure", action="store_true", help="also measure the network itself, token by token")
    add_outputs(parser, figure=False)


def context_shuffle(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    kinds = ("shuffle", "reverse", "replace", "drop")
    add_choice(parser, "--perturb", kinds, "what happens to the context")
    add_counts(
        parser,
        ("--tokens-per-sample", None, "window (default: 512, or as many as all the models have positions for)"),
        ("--damaged --context-window", None, "damaged tokens at the beginning of a window (default: half of it)"),
        ("--limit --windows", None, "use N windows (default: all)"),
    )
    add_seed(parser, "the damage and of the bootstrap")
    add_outputs(parser)


def context_window(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    help = "context lengths (default: powers of two up to 512, as far as all the models have positions)"
    add_list(parser, "--contexts", "--context", help=help)
    add_counts(parser, ("--limit --targets", 1000, "predict N tokens"))
    add_seed(parser, "the bootstrap")
    add_outputs(parser)


def memory(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--data", help="of --path: folder with its dictionary (default: the one trained on)")
    add_counts(
        parser,
        ("--batch-size", None, "samples (default: 1)"),
        ("--vocabulary", None, f"symbols (default: {BOOKCORPUS}, BookCorpus, or as many as adaptive cutoffs need)"),
        ("--most-layers", 16, "of --fit, at a scale"),
        ("--top --show", 10, "allocations of --fit to print"),
    )
    parser.add_argument("--no-measurement", action="store_true", help="follow the shapes of a step without running it")
    parser.add_argument("--fit", type=float, metavar="GIB", help="which layers a scale fit into so many GiB")
    help = "memory and forward time of one layer at 1x, 4x, 16x and 64x for these numbers of tokens (Figure 2)"
    add_list(parser, "--sweep", help=help)
    add_cpu(parser)
    add_outputs(parser)


def neighbors(parser: argparse.ArgumentParser) -> None:
    add_scored(parser, split="train")
    add_counts(
        parser,
        ("--tokens-per-sample --segment", None, "tokens of a segment (default: 128, or the model's)"),
        ("--limit", None, "search only the first N segments"),
        ("--top --count", 3, "neighbours"),
    )
    add_list(parser, "--scales", help="such as 4,16,64 (default: all)")
    parser.add_argument("--text", action="append", help="query: a text tokenised like the corpus (repeatable)")
    help = "query: the segment that holds token N of the split (repeatable; default: the middle of the corpus)"
    parser.add_argument("--position", type=int, action="append", metavar="N", help=help)
    add_remove_bpe(parser)
    add_outputs(parser, figure=False)


def nll_by_frequency(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    add_window(parser)
    add_counts(parser, ("--bins", 10, "number of bins"), ("--limit", None, "score only the first N tokens"))
    parser.add_argument("--train-subset", default="train", help="split whose frequencies count (default: train)")
    add_outputs(parser)


def perplexity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="file that fairseq-train wrote")
    add_data(parser, "test")
    add_window(parser)
    add_counts(
        parser,
        ("--batch-size", None, "most windows in a batch (default: what --max-tokens has room for)"),
        ("--max-tokens", 36000, "most tokens in a batch"),
    )
    help = "none: running text; eos: every line or image by itself, without context (default: as in training)"
    parser.add_argument("--sample-break-mode", choices=("none", "eos"), help=help)
    parser.add_argument("--fp16", action="store_true", help="half precision")
    add_cpu(parser)
    parser.add_argument("--manifest", type=Path, help="counts of the data (default: manifest.json in or above --data)")
    add_outputs(parser, figure=False)


def plot(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(fairseq_flags=[])
    figures = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    attention = figures.add_parser(
        "attention",
        help="which blocks a multi-scale model looks at (Multi-scale Transformer LMs, Figure 1)",
        usage="fairseq-ms plot attention --arch ARCH [FLAGS OF FAIRSEQ-TRAIN ...] --png FILE [OPTIONS]",
        allow_abbrev=False,
    )
    add_counts(attention, ("--length", 48, "tokens of the text"))
    context = figures.add_parser(
        "context",
        help="what a training step keeps and takes against context length (Transformer-QL, Section 2.4)",
        allow_abbrev=False,
    )
    help = "segment lengths, multiples of 4; the memory is as long (default: 4,8,16,32,64)"
    add_list(context, "--segments", default=[4, 8, 16, 32, 64], help=help)
    add_counts(
        context,
        ("--decoder-embed-dim --dim", 256, "model dimension"),
        ("--batch-size --streams", 8, "streams"),
        ("--rounds", 5, "timed steps"),
    )
    curves = figures.add_parser(
        "curves",
        help="losses of training runs over updates, hours or sizes, from fairseq's logs (HAED, Figures 2 to 4)",
        allow_abbrev=False,
    )
    help = "what fairseq-train printed; logs behind a comma are later phases of the same training"
    curves.add_argument("logs", nargs="+", metavar="[LABEL=]LOG[,LOG ...]", help=help)
    what = "label: the best of each run against its label, a number such as units of a layer"
    add_choice(curves, "--over", ("updates", "hours", "label"), what)
    add_flag(curves, "--gen-subset", "--subset", default="valid", help="train, or a validation split (default: valid)")
    curves.add_argument("--metric", default="loss", help="statistic of the log; loss is in bits (default: loss)")
    for figure in (attention, context, curves):
        add_outputs(figure)


def recall(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    add_window(parser)
    add_counts(parser, ("--bins", 16, "ranges of distances"), ("--limit", None, "read only the first N tokens"))
    add_seed(parser, "the guesses")
    add_outputs(parser)


def sample_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="fairseq's data folder, as fairseq-ms prepare images writes it")
    parser.add_argument("--path", required=True, help="checkpoint of a model of pixels")
    parser.add_argument("--png", required=True, type=Path, help="where the grid goes")
    parser.add_argument("--count", type=int, default=16, help="images to draw from nothing (default: 16)")
    help = "images of the split to complete, beside the originals (default: none)"
    parser.add_argument("--complete", type=int, default=0, help=help)
    help = "split of the data that images to complete come from (default: valid)"
    add_flag(parser, "--gen-subset", "--split", default="valid", help=help)
    parser.add_argument("--keep", type=float, default=0.5, help="share of an image's rows to be given (default: 0.5)")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits (default: 1.0)")
    add_counts(
        parser,
        ("--columns", 8, "images in a row of the grid"),
        ("--scale", 4, "pixels of the PNG, a side, for one of an image's"),
        ("--batch-size", 32, "images to draw at a time"),
    )
    add_seed(parser, "the random numbers")


def sample_metrics(parser: argparse.ArgumentParser) -> None:
    add_scored(parser)
    add_counts(
        parser,
        ("--prompts", 100, "contexts from the split"),
        ("--prefix-size --context", 64, "tokens of a context"),
        ("--length", 256, "tokens of a sample"),
        ("--completions", 3, "samples a prompt"),
        ("--sampling-topk", 10, "draw from the N likeliest tokens"),
        ("--batch-size", 8, "prompts in a batch"),
        ("--timed", 5, "prompts timed"),
        ("--show", None, "print the models' samples for N prompts below each other"),
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="divides the logits (default: 0.7)")
    parser.add_argument("--ngram-lm", metavar="FILE", help="kenlm model of the tokenised text, ARPA or binary")
    help = "estimate a 4-gram of the training split with kenlm's lmplz"
    parser.add_argument("--estimate-ngram-lm", action="store_true", help=help)
    help = "local folder of GPT-2 or another causal model, which judges the text with Moses' tokenisation undone"
    parser.add_argument("--hf-lm", metavar="FOLDER", help=help)
    add_remove_bpe(parser)
    add_seed(parser, "the samples")
    add_outputs(parser, figure=False)


def tradeoff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="folder below which the runs' save directories lie")
    parser.add_argument("--checkpoint", default="checkpoint_best.pt", help="its file (default: checkpoint_best.pt)")
    add_data(parser, "test")
    add_counts(
        parser,
        ("--limit", None, "score only the first N tokens"),
        ("--batch-size", 1, "samples of a training step"),
        ("--max-tokens", 8192, "tokens in a batch"),
    )
    add_choice(parser, "--cost", ("memory", "time"), "of the figure")
    add_cpu(parser)
    add_outputs(parser)
